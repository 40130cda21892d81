"""conf/ is at the top of a checkout and travels in the wheel as memtrain/conf; all else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["memtrain*"]), "memtrain.conf"],
    package_dir={"memtrain.conf": "conf"},
    package_data={"memtrain.conf": ["**/*.yaml"]},
    exclude_package_data={"memtrain.conf": ["local/*"]},
)
