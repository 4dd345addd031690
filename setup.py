"""The folders beside `hushfleet/` are installed below it: nobody's own `models` or `simulator` is hidden by ours.

A folder is found as `hushfleet.<folder>`, wherever the checkout lies; everything else is in pyproject.toml.
"""

from setuptools import find_packages, setup

NESTED = ("aggregator", "edge_client", "firmware_profiles", "models", "simulator")

inside = [package for folder in NESTED for package in (folder, *(f"{folder}.{p}" for p in find_packages(folder)))]

setup(
    packages=[*find_packages(include=["hushfleet", "hushfleet.*"]), *(f"hushfleet.{package}" for package in inside)],
    package_dir={f"hushfleet.{folder}": folder for folder in NESTED},
)
