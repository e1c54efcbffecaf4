"""Figures of studies. Each function returns a matplotlib `Figure`; `style.save` writes it as PNG, PDF or SVG."""
