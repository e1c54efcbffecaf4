"""Several hosts on one machine, to rehearse what a cluster does to a job before a cluster does it."""
