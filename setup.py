"""Packaging: everything comes from settings.ini, so that a dependency is declared once."""
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="], interpolation=None)
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
extras = {name: cfg[f"{name}_requirements"].split() for name in ("notebook", "dev", "bench")}

setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"], keywords=cfg["keywords"],
    author=cfg["author"], license="Apache-2.0", python_requires=f">={cfg['min_python']}",
    long_description=(here / "README.md").read_text(encoding="utf-8"), long_description_content_type="text/markdown",
    packages=find_packages(include=["libai_wb", "libai_wb.*"]), include_package_data=True,
    package_data={"libai_wb": ["configs/**/*.py", "configs/**/*.yaml"]},
    install_requires=cfg["requirements"].split(), extras_require=extras,
    entry_points={"console_scripts": cfg["console_scripts"].split(), "nbdev": [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
    zip_safe=False,
)
