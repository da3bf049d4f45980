"""What a file of tests consists of: its own source, and that of all it imports from this project."""

import ast
import hashlib
import platform
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

LIBRARIES = ("triton", "torch", "numpy")


class Sources:
    """The Python files below a folder, by the imports between them, those within functions included."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.imports = cache(self._imports)
        self.content = cache(self._content)
        """Hash of files, of all that they import, and of what runs them, whatever device torch was built for."""

    def closure(self, *files: Path) -> set[Path]:
        """These files and all that they import, directly or not."""
        found: set[Path] = set()
        open_ends = set(files)
        while open_ends:
            found |= open_ends
            open_ends = {file for each in open_ends for file in self.imports(each)} - found
        return found

    def _content(self, *files: Path) -> str:
        content = hashlib.sha256(f"{platform.machine()} {sys.version_info[:2]}".encode())
        for library in LIBRARIES:
            content.update(f" {library} {version(library).partition('+')[0]}".encode())
        for file in sorted(self.closure(*files)):
            source = file.read_bytes()
            content.update(f"\n{file.relative_to(self.root)} {len(source)}\n".encode() + source)
        return content.hexdigest()[:24]

    def files_of(self, module: str) -> set[Path]:
        """The file of a module and those of the packages around it; empty for other projects' modules."""
        names = module.split(".")
        places = (self.root.joinpath(*names[:count]) for count in range(1, len(names) + 1))
        found = (file for place in places for file in (place / "__init__.py", place.with_suffix(".py")))
        return {file for file in found if file.is_file()}

    def _imports(self, file: Path) -> set[Path]:
        package = file.relative_to(self.root).parent.parts
        modules = [".".join((*package, file.stem))]  # Its own packages run before it.
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                modules += (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) + 1 - node.level] if node.level else ()
                origin = ".".join((*above, *filter(None, (node.module,))))
                modules += (f"{origin}.{alias.name}" for alias in node.names)
        return {found for module in modules for found in self.files_of(module)}
