"""Where checkpoints lie: folders, and the hub, of which only the files that are needed are fetched."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.contract.errors import BuildError
from specexport.exporter.checkpoints import tokenizer
from specexport.exporter.checkpoints.checkpoint import load_checkpoint
from specexport.exporter.checkpoints.locate import locate
from specexport.exporter.checkpoints.tokenizer import load_tokenizer
from specexport.methods.eagle3.export import read_eagle3
from tests.checkpoints import make_checkpoint, make_eagle3
from tests.hub import hub

pytestmark = pytest.mark.exporter

OTHERS = (
    "README.md", ".gitattributes", "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "tf_model.h5",
    "flax_model.msgpack", "rust_model.ot", "consolidated.safetensors", "consolidated.00.pth", "params.json",
    "model-q4.gguf", "original/model.safetensors", "original/params.json", "original/tokenizer.model",
    "onnx/model.onnx", "onnx/config.json", "onnx/tokenizer.json", "openvino/openvino_model.xml", "gguf/model.gguf",
    "model.fp16.safetensors", "checkpoint-10/model.safetensors", "checkpoint-10/optimizer.pt", "training_args.bin",
    "trainer_state.json", "preprocessor_config.json", "modeling_other.py", "vocab.json", "merges.txt",
    "tokenizer.model", "metal/model.bin", "figures/chart.json", "requirements.txt", "LICENSE.txt",
)  # fmt: skip
"""What repositories have for other programs, or twice."""
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
SETTINGS = {"config.json", "generation_config.json"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made") / "model", "llama", num_hidden_layers=5)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def fetched(root: Path, tmp_path: Path) -> Iterator[set[str]]:
    with hub(root, tmp_path / "cache") as files:
        yield files


@pytest.fixture
def model(root: Path, tiny: Path) -> Path:
    """A model on the hub, with what else there is in repositories."""
    folder = shutil.copytree(tiny, root / "owner" / "model")
    for name in OTHERS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")  # files of the same content are fetched once
    return folder


def of(files: set[str], name: str) -> set[str]:
    return {file.removeprefix(f"owner/{name}/") for file in files if file.startswith(f"owner/{name}/")}


def test_only_needed_files_are_downloaded(model, fetched, tiny):
    (model / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/rag.jinja"):
        (model / name).write_text(name, encoding="utf-8")
    templates = {"chat_template.jinja", "additional_chat_templates/rag.jinja"}
    folder = locate("owner/model")
    assert of(fetched, "model") == SETTINGS | TOKENIZER | templates | {"model.safetensors"}
    assert load_checkpoint("owner/model").parameters == load_checkpoint(str(tiny)).parameters
    files = {"default": "chat_template.jinja", "rag": "additional_chat_templates/rag.jinja"}
    assert load_tokenizer(folder).chat_templates == files


def test_of_a_model_in_shards_those_of_the_index_are_fetched(model, fetched):
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {f"model-0000{at + 1}-of-00002.safetensors": names[at::2] for at in range(2)}
    for file, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, model / file)
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (model / "model-00003-of-00003.safetensors").write_bytes(b"of an older upload")
    locate("owner/model")
    assert of(fetched, "model") == SETTINGS | TOKENIZER | {*parts, "model.safetensors.index.json"}


def test_without_a_tokenizers_file_its_vocabulary_is_fetched(model, fetched):
    (model / "tokenizer.json").unlink()
    locate("owner/model")
    assert of(fetched, "model") == SETTINGS | {
        "tokenizer_config.json", "model.safetensors", "vocab.json", "merges.txt", "tokenizer.model",
    }  # fmt: skip


def test_a_pickled_model_is_refused_before_it_is_fetched(model, fetched):
    for file in (*model.rglob("*.safetensors"), *model.rglob("*.gguf")):
        file.unlink()
    with pytest.raises(BuildError, match=r"found no weights, expected \*\.safetensors"):
        locate("owner/model")
    assert of(fetched, "model") == SETTINGS | TOKENIZER


def test_a_pickled_model_in_a_folder_is_refused_with_what_to_do(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BuildError, match=r"found pytorch_model\.bin, expected .*save_pretrained\("):
        load_checkpoint(str(folder))


def pickled(draft: Path) -> Path:
    torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
    (draft / "model.safetensors").unlink()
    return draft


def test_pickled_heads_are_read_as_plain_tensors(root, fetched, tiny, tmp_path):
    """From a folder and from the hub."""
    plain = make_eagle3(tmp_path / "plain", tiny)
    draft = shutil.copytree(plain, root / "owner" / "draft")
    for folder in (str(pickled(draft)), "owner/draft"):
        outline = read_eagle3(folder)
        expected, parts = read_eagle3(str(plain)).stored(), outline.stored()
        assert expected.keys() == parts.keys()
        assert all(torch.equal(expected[name].read(), parts[name].read()) for name in expected)
        loaded = outline.load(tiny, 5, 64).state_dict()
        assert all(torch.equal(loaded[name], each) for name, each in
                   read_eagle3(str(plain)).load(tiny, 5, 64).state_dict().items())  # fmt: skip
    assert of(fetched, "draft") == {"config.json", "pytorch_model.bin"}


def test_heads_are_fetched_once(root, fetched, tiny):
    draft = make_eagle3(root / "owner" / "draft", tiny)
    (draft / "pytorch_model.bin").write_bytes(b"twice")
    read_eagle3("owner/draft")
    assert of(fetched, "draft") == {"config.json", "model.safetensors"}


class Harmful:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("harm",)


def test_pickled_code_is_not_run(tiny, tmp_path, capsys):
    draft = pickled(make_eagle3(tmp_path / "draft", tiny))
    torch.save({"fc.weight": Harmful()}, draft / "pytorch_model.bin")
    with pytest.raises(BuildError, match=r"pytorch_model\.bin: refused: only plain tensors .*save_file\(") as caught:
        read_eagle3(str(draft)).stored()
    assert "\n" not in str(caught.value)
    assert "harm" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "library"), [(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02", "sentencepiece"), (b"IQ== 0\n", "tiktoken")]
)
def test_missing_tokenizer_packages_are_named(tiny, tmp_path, content, library, monkeypatch):
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(content)
    monkeypatch.setattr(tokenizer, "find_spec", lambda _: None)
    with pytest.raises(BuildError, match=rf"tokenizer\.model: read by {library}, .* pip install {library}") as caught:
        load_tokenizer(folder)
    assert ("tiktoken" in str(caught.value)) == (library == "tiktoken")


def test_a_file_of_another_name_is_not_called_missing(tmp_path):
    """As in Ollama's folder of blobs."""
    (tmp_path / "sha256-1f").write_bytes(b"GGUF")
    with pytest.raises(BuildError, match=r"sha256-1f: its name does not end in \.gguf; expected a Hugging Face model"):
        locate(str(tmp_path / "sha256-1f"))
