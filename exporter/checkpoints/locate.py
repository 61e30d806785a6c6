"""Locates checkpoints. Imports nothing heavy, so that finding an existing bundle needs no torch."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path, PurePath

from specexport.contract.errors import BuildError
from specexport.contract.folders import expanded, home, temporary_folder
from specexport.exporter.checkpoints.documents import (
    ADAPTER,
    CONFIG,
    GENERATION,
    INDEX,
    SINGLE,
    read_index,
    read_object,
)
from specexport.exporter.checkpoints.quiet import failing_as

GGUF = ".gguf"
_SPLIT = re.compile(r"-\d{5}-of-(?P<count>\d{5})\.gguf$")
_TOKENIZER = (
    "tokenizer.json", "tokenizer.*.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "processor_config.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
_VOCABULARY = (
    "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "sentencepiece.model", "tiktoken.model", "tekken.json",
)  # fmt: skip
"""Files that transformers converts to a ``tokenizer.json`` if there is none."""
_SETTINGS = (CONFIG, GENERATION, INDEX, ADAPTER)
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_PICKLED = "pytorch_model.bin"
_MAX_PICKLED_LAYERS = 4
"""Heads and drafts of at most this many layers may be read from a pickled file; whole models never are."""


def locate(source: str, *, weights: bool = True) -> Path:
    """The local folder of a checkpoint, with its configuration; see :func:`find`."""
    path = find(source, weights=weights)
    if not (path / CONFIG).is_file():
        from specexport.exporter.checkpoints.gguf.folder import describe  # imports torch

        describe(path)
    return path


def find(source: str, *, weights: bool = True) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded into the hub's own cache.

    For a GGUF file, or an adapter without its model, it is a temporary folder with links: to the file, or to the files
    of the adapter and of its model.

    Args:
        source: a folder, a hub id, a GGUF file, or a GGUF file on the hub: ``owner/name/FILE.gguf``.
        weights: whether weights are needed, rather than only the files that describe the model.
    """
    path = _folder(source, None, weights)
    if any(path.glob(f"*{GGUF}")) and not any(path.glob("*.safetensors")):
        return path
    if not (path / CONFIG).is_file() and (path / ADAPTER).is_file():
        try:
            base = _folder(*base_of(path), weights)
        except BuildError as error:
            raise BuildError(f"{path / ADAPTER}: base_model_name_or_path: {error}") from error
        path = _linked_adapter(path, base)
    if not (path / CONFIG).is_file() and (path / "specexport.json").is_file():
        raise BuildError(f"{path}: a bundle, which is built already; expected a Hugging Face model folder or a hub id")
    if not (path / CONFIG).is_file():
        raise BuildError(f"{path}: neither {CONFIG} nor specexport.json; expected a model folder or a bundle")
    if weights and not any(path.glob("*.safetensors")) and not (path / _PICKLED).is_file():
        stored = ", ".join(sorted(p.name for p in path.glob("*.bin"))) or "no weights"
        raise BuildError(f"{path}: {unreadable(stored)}")
    return path


def _folder(source: str, revision: str | None, weights: bool) -> Path:
    """The folder of a source; ``revision`` is that of a hub id."""
    path = expanded(source)
    files = sorted(file.name for file in (path if path.is_dir() else path.parent).glob(f"*{GGUF}"))
    if path.suffix == GGUF and path.is_file():
        return _linked_gguf(path.parent, split_files(source, path.name, files))
    if path.is_dir():
        if files and not any(path.glob("*.safetensors")):
            return _linked_gguf(path, only_model(source, files))
        return path
    of_hub = not source.startswith((".", "/", "~")) and not path.exists()
    if of_hub and (source.count("/") == 1 or (source.count("/") > 1 and path.suffix == GGUF)):
        return _fetched(source, revision, weights)
    missing = "no such file" if path.suffix == GGUF else "no such folder"
    wrong = f"its name does not end in {GGUF}" if path.is_file() else missing
    raise BuildError(f"{source}: {wrong}; expected a Hugging Face model folder, a GGUF file or a hub id (owner/name)")


def only_model(source: str, names: list[str]) -> list[str]:
    """The files of the only GGUF language model among ``names``; projectors of images and audio do not count."""
    models = [name for name in names if not PurePath(name).name.startswith("mmproj")]
    if not models:
        raise BuildError(f"{source}: found {', '.join(names)}, which is not a language model; expected one")
    splits = {_SPLIT.sub("", name): name for name in reversed(models)}
    if len(splits) > 1:
        listed = ", ".join(sorted(splits.values()))
        raise BuildError(
            f"{source}: holds {len(splits)} GGUF models; name the one to build: {source.rstrip('/')}/FILE{GGUF}, FILE "
            f"being one of {listed}"
        )
    return split_files(source, next(iter(splits.values())), names)


def split_files(source: str, name: str, names: list[str]) -> list[str]:
    """All parts of a split GGUF model, from the name of one part."""
    match = _SPLIT.search(name)
    if match is None:
        return [name]
    count = int(match["count"])
    parts = [f"{name[: match.start()]}-{number + 1:05}-of-{count:05}{GGUF}" for number in range(min(count, 10_000))]
    if missing := sorted(set(parts) - set(names)):
        raise BuildError(f"{source}: the model is in {count} files, and {missing[0]} is missing; fetch it as well")
    return parts


def unreadable(files: str) -> str:
    """The error message for a model whose weights are not safetensors."""
    return (
        f"found {files}, expected *.safetensors. Pickled weights of models are not read, as they can run code; convert "
        "them with model.save_pretrained(..., safe_serialization=True) where you trust them"
    )


def base_of(adapter: Path) -> tuple[str, str | None]:
    """The base model of an adapter, and its revision."""
    path = adapter / ADAPTER
    document = read_object(path)
    base, revision = document.get("base_model_name_or_path"), document.get("revision")
    if not isinstance(base, str) or not base or not isinstance(revision, str | None):
        raise BuildError(f"it is {base!r}; expected the folder or hub id of the adapter's model")
    return base, revision


def _fetched(source: str, revision: str | None, weights: bool) -> Path:
    """Downloads a hub id: the files that describe the model, and its weights in one format; or a GGUF file of it."""
    owner, name, *inside = source.split("/")
    repository, file = _Repository(f"{owner}/{name}", revision), "/".join(inside)
    if weights and find_spec("onnx") is None and not repository.stored:  # only a stored model may have been built
        raise BuildError(
            f"{repository.name}: no such folder, and building a model of the hub needs the [export] extra; install it "
            "with: pip install 'specexport[cpu,export]'"
        )
    with failing_as(lambda error: f"{repository.name}: not a local folder, and the hub could not provide it: {error}"):
        if file:
            return repository.fetch_gguf(repository.gguf_files(), file)
        folder = repository.fetch(*_SETTINGS, *_TOKENIZER)
        if not (folder / "tokenizer.json").is_file():
            repository.fetch(*_VOCABULARY)
        if weights:
            repository.fetch_weights(folder)
        described = (folder / CONFIG).is_file()
        usable = any(folder.glob("*.safetensors")) or (folder / _PICKLED).is_file() if weights else described
        if usable or not (names := repository.gguf_files()):
            return folder
        return repository.fetch_gguf(names)


class _Repository:
    """A model's repository on the hub, whose files are downloaded into the hub's own cache."""

    def __init__(self, name: str, revision: str | None) -> None:
        self.name = name
        self._revision = revision
        import huggingface_hub
        import huggingface_hub.constants

        self._hub = huggingface_hub

    @property
    def stored(self) -> bool:
        """Whether any of its files is in the hub's cache."""
        root = hub_cache() or self._hub.constants.HF_HUB_CACHE
        return Path(root, f"models--{self.name.replace('/', '--')}").is_dir()

    def fetch(self, *patterns: str, ignored: Sequence[str] = ("*/*", "consolidated*")) -> Path:
        """Downloads files; patterns without a folder mean files at the top level, though "*" would match others too."""
        return Path(
            self._hub.snapshot_download(
                self.name,
                revision=self._revision,
                allow_patterns=list(patterns),
                ignore_patterns=[] if any("/" in pattern for pattern in patterns) else list(ignored),
                cache_dir=hub_cache(),
            )
        )

    def fetch_weights(self, folder: Path) -> None:
        """Downloads the weights of a model, or of an adapter, whose settings are in the folder."""
        indexed = sorted(set(read_index(folder / INDEX).values())) if (folder / INDEX).is_file() else [SINGLE]
        adapted = (folder / ADAPTER).is_file()
        self.fetch(*indexed, *(_ADAPTERS[:1] if adapted else ()))
        if adapted and not (folder / _ADAPTERS[0]).is_file():
            self.fetch(*_ADAPTERS[1:])
        if (folder / CONFIG).is_file() and not any(folder.glob("*.safetensors")):
            self.fetch("*.safetensors")
            if not any(folder.glob("*.safetensors")) and _layers(folder / CONFIG) <= _MAX_PICKLED_LAYERS:
                self.fetch(_PICKLED)

    def gguf_files(self) -> list[str]:
        names = self._hub.list_repo_files(self.name, revision=self._revision)
        return sorted(name for name in names if name.endswith(GGUF))

    def fetch_gguf(self, names: list[str], file: str = "") -> Path:
        """Downloads a GGUF model among ``names``, by default the only one."""
        if file and file not in names:
            listed = ", ".join(names) or "none"
            raise BuildError(f"{self.name}: has no file {file}; its GGUF files: {listed}")
        files = split_files(self.name, file, names) if file else only_model(self.name, names)
        return _linked_gguf(self.fetch(*files, ignored=()), files)


def _layers(config: Path) -> int:
    document = read_object(config)
    counts = (document.get(name) for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    return max((count for count in counts if isinstance(count, int)), default=1)


def _linked_adapter(adapter: Path, base: Path) -> Path:
    """A folder with the files of an adapter and of its model; the tokenizer is the adapter's, if it has one."""
    if (base / ADAPTER).is_file():
        raise BuildError(
            f"{adapter / ADAPTER}: its model, {base}, is an adapter or has one; merge them with peft first "
            "(merge_and_unload), and build from what it saves"
        )
    matching = _matching(adapter, *_TOKENIZER, *_VOCABULARY)
    if not any(file.name in ("tokenizer.json", "tokenizer_config.json", *_VOCABULARY) for file in matching):
        matching = []
    replaced = {file.relative_to(base) for file in _matching(base, *_TOKENIZER, *_VOCABULARY)} if matching else set()
    files = {file.relative_to(base): file for file in base.rglob("*") if file.is_file()}
    files = {place: file for place, file in files.items() if place not in replaced}
    for file in (*matching, *_matching(adapter, GENERATION, ADAPTER, *_ADAPTERS)):
        files[file.relative_to(adapter)] = file
    return _linked(tuple(sorted((str(place), str(file.absolute())) for place, file in files.items())))


def _linked_gguf(folder: Path, names: list[str]) -> Path:
    """A folder with the files of a GGUF model alone; other files beside them may belong to other models."""
    files = [(PurePath(name).name, (folder / name).absolute()) for name in names]
    states = [file.stat() for _, file in files]
    stamp = tuple((state.st_size, state.st_mtime_ns, state.st_ino) for state in states)
    return _linked(tuple((name, str(file)) for name, file in files), stamp)


def _matching(folder: Path, *patterns: str) -> list[Path]:
    return [file for pattern in patterns for file in folder.glob(pattern) if file.is_file()]


@functools.cache
def _linked(files: tuple[tuple[str, str], ...], stamp: object = None) -> Path:
    """A folder of links to files by relative path, one for each ``stamp``; deleted when the process ends."""
    del stamp
    folder = Path(tempfile.mkdtemp(prefix="specexport-checkpoint-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for place, file in files:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).symlink_to(file)
    return folder


def hub_cache() -> Path | None:
    """The cache folder for the hub's client, None for its default; avoids a folder literally named ``~``."""
    configured = any(map(os.environ.get, ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")))
    return None if configured or home() is not None else temporary_folder() / "hub"
