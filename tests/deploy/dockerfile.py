"""Parses and checks Dockerfiles without a container engine: their sources, commands, arguments and ports.

Supports the instructions that the project's Dockerfile uses, and raises ValueError for all others.
"""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy import code

_KNOWN = {"FROM", "ARG", "RUN", "COPY", "ENV", "WORKDIR", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::[-+][^}]*)?\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its line number, its keyword, and the text after the keyword."""

    line: int
    keyword: str
    rest: str

    def copies(self) -> tuple[str, list[str], str]:
        """The --from of a COPY (or an empty string), its sources and its target."""
        words = shlex.split(self.rest)
        stage = ""
        if words[0].startswith("--from="):
            stage = words.pop(0).removeprefix("--from=")
        return stage, words[:-1], words[-1]

    def words(self) -> list[str]:
        """The list of an ENTRYPOINT or CMD. It must be JSON: a shell would not forward signals to the service."""
        value: list[str] = json.loads(self.rest)
        return value


@dataclass(slots=True)
class Stage:
    """One build stage: a FROM and the instructions up to the next FROM."""

    name: str
    base: str
    body: list[Instruction] = field(default_factory=list)

    def all(self, keyword: str) -> list[Instruction]:
        """All instructions of the stage with this keyword."""
        return [instruction for instruction in self.body if instruction.keyword == keyword]

    def last(self, keyword: str) -> str:
        """The text of the last instruction with this keyword, or an empty string."""
        found = self.all(keyword)
        return found[-1].rest if found else ""

    def command(self) -> list[str]:
        """The default command of a container: ENTRYPOINT, then CMD."""
        entry, command = self.all("ENTRYPOINT"), self.all("CMD")
        return [*(entry[-1].words() if entry else []), *(command[-1].words() if command else [])]

    def ports(self) -> set[int]:
        """Exposed ports."""
        return {int(word) for instruction in self.all("EXPOSE") for word in instruction.rest.split()}


@dataclass(slots=True)
class Dockerfile:
    """Arguments before the first stage with their defaults, and the stages in order."""

    arguments: dict[str, str]
    stages: list[Stage]

    def stage(self, name: str) -> Stage:
        """The stage of this name. Raises StopIteration if there is none."""
        return next(stage for stage in self.stages if stage.name == name)


def parse(text: str) -> Dockerfile:
    """Parses a Dockerfile. Raises ValueError for an unsupported instruction."""
    result = Dockerfile({}, [])
    for instruction in _instructions(text):
        if instruction.keyword == "FROM":
            match = re.fullmatch(r"(\S+) AS (\S+)", instruction.rest)
            if match is None:
                raise ValueError(f"line {instruction.line}: a stage without a name")
            result.stages.append(Stage(match[2], _substitute(match[1], result.arguments)))
        elif result.stages:
            result.stages[-1].body.append(instruction)
        elif instruction.keyword == "ARG":
            name, _, value = instruction.rest.partition("=")
            result.arguments[name] = value
        else:
            raise ValueError(f"line {instruction.line}: {instruction.keyword} before FROM")
    return result


def _instructions(text: str) -> Iterator[Instruction]:
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        start = start if pending else number
        pending += line.strip().removesuffix("\\")
        if line.rstrip().endswith("\\"):
            continue
        keyword, _, rest = pending.partition(" ")
        if keyword not in _KNOWN:
            raise ValueError(f"line {start}: {keyword} is not understood")
        yield Instruction(start, keyword, rest.strip())
        pending = ""
    if pending:
        raise ValueError(f"line {start}: does not end")


def _substitute(text: str, values: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], match[0]), text)


class Ignore:
    """A .dockerignore: the last pattern that matches a path or one of its parents applies."""

    def __init__(self, text: str) -> None:
        lines = (line.strip() for line in text.splitlines())
        patterns = [line for line in lines if line and not line.startswith("#")]
        self._rules = [(not line.startswith("!"), _regex(line.lstrip("!"))) for line in patterns]

    def excludes(self, path: str) -> bool:
        """Whether a path, relative to the build context, is excluded."""
        parts = path.split("/")
        above = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        excluded = False
        for excludes, pattern in self._rules:
            if any(pattern.fullmatch(folder) for folder in above):
                excluded = excludes
        return excluded


def _regex(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.strip("/"))
    special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(special.get(piece, re.escape(piece)) for piece in pieces))


def problems(text: str, ignore: Ignore, root: Path) -> list[str]:
    """Problems of a Dockerfile whose build context is the folder `root`."""
    file = parse(text)
    return [problem for stage in file.stages for problem in _stage_problems(stage, file, ignore, root)]


def _stage_problems(stage: Stage, file: Dockerfile, ignore: Ignore, root: Path) -> Iterator[str]:
    before = [other.name for other in file.stages[: file.stages.index(stage)]]
    if stage.base not in before and not pinned(stage.base):
        yield f"{stage.name}: its base {stage.base} is not pinned"
    yield from _copy_problems(stage, before, ignore, root)
    yield from _variable_problems(stage)
    yield from _install_problems(stage)
    if stage.all("ENTRYPOINT"):
        yield from _run_problems(stage)


def _copy_problems(stage: Stage, before: list[str], ignore: Ignore, root: Path) -> Iterator[str]:
    for instruction in stage.all("COPY"):
        origin, sources, _ = instruction.copies()
        if origin:
            if origin not in before:
                yield f"line {instruction.line}: there is no stage {origin} before this one"
            continue
        for source in sources:
            path = root / source
            if not path.exists():
                yield f"line {instruction.line}: {source} does not exist"
            elif ignore.excludes(source) or (path.is_dir() and not any(kept(path, ignore, root))):
                yield f"line {instruction.line}: .dockerignore leaves {source} out"


def kept(folder: Path, ignore: Ignore, root: Path) -> Iterator[Path]:
    """The files below a folder that are part of the build context."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not ignore.excludes(path.relative_to(root).as_posix()):
            yield path


def _variable_problems(stage: Stage) -> Iterator[str]:
    known = {"PATH"}
    for instruction in stage.body:
        if instruction.keyword == "ARG":
            known.add(instruction.rest.partition("=")[0])
        for match in _VARIABLE.finditer(instruction.rest):
            if (match[1] or match[2]) not in known:
                yield f"line {instruction.line}: {match[0]} is not set in this stage"


def _install_problems(stage: Stage) -> Iterator[str]:
    for instruction in stage.all("RUN"):
        for names in re.findall(r"\.\[([\w,]+)\]", instruction.rest):
            for name in names.split(","):
                if name not in code.extras():
                    yield f"line {instruction.line}: there is no extra {name}"
        for _ in re.findall(r"pip install(?! --no-cache-dir)", instruction.rest):
            yield f"line {instruction.line}: pip's cache stays in the image"


def _run_problems(stage: Stage) -> Iterator[str]:
    command = stage.command()
    yield from (f"{stage.name}: {problem}" for problem in code.command_problems(command))
    user = stage.last("USER")
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", user):
        yield f"{stage.name}: its user {user or 'root'} is not an unprivileged number"
    ours = {number for service in code.SETTINGS for number in code.ports(service).values()}
    for number in sorted(stage.ports() - ours - {code.METRICS_PORT}):
        yield f"{stage.name}: no service listens at {number}"
    if not set(code.ports(command[-1]).values()) <= stage.ports() if command[-1] in code.SETTINGS else True:
        yield f"{stage.name}: does not expose what {command[-1]} listens at"


def pinned(image: str) -> bool:
    """Whether an image is named by a full version or digest, and not by a tag that is moved to newer releases."""
    tag = image.rpartition("/")[2].partition(":")[2]
    return bool(re.match(r"v?\d+\.\d+\.\d+", tag)) or "@sha256:" in image
