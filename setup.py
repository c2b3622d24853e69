"""Packages are found, not listed: a new subpackage of coldkv ships without touching the build files.

kernels/ stays a folder of its own that C++ engines can copy; installed, it is the data package `coldkv._kernels`.
"""

from pathlib import Path

from setuptools import find_packages, setup

packages = find_packages(include=["coldkv", "coldkv.*"])
if Path("kernels").is_dir():
    packages.append("coldkv._kernels")
setup(packages=packages)
