# SPDX-License-Identifier: Apache-2.0
"""Published data sets, from local files and as the hub gives them; their graders take what was written."""

import gzip
import io
import json
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from quadriga.config import DataConfig
from quadriga.data import RMDataset
from quadriga.errors import DataError
from quadriga.rewards.scoring import default_compute_score
from quadriga_recipes.playground import build_tokenizer
from quadriga_recipes.tasks import prepare_data


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(count: int, start: int = 0) -> list[dict]:
    return [
        {"question": f"q{i}", "answer": f"Think.\n#### 1,00{i}"}
        for i in range(start, start + count)
    ]


def read(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def questions(path: Path) -> list[str]:
    return [row["extra_info"]["question"] for row in read(path)]


def test_a_folder_with_train_and_test(tmp_path: Path):
    lines(tmp_path / "train.jsonl", make(4))
    pq.write_table(pa.Table.from_pylist(make(2, start=4)), tmp_path / "test-00000-of-00001.parquet")
    paths = prepare_data("gsm8k", tmp_path / "out", source=str(tmp_path))
    assert questions(paths["train"]) == ["q0", "q1", "q2", "q3"]
    assert questions(paths["val"]) == ["q4", "q5"]
    row = read(paths["val"])[1]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1005"}
    assert row["prompt"][0]["content"].startswith("q5\n\n")
    assert "####" in row["prompt"][0]["content"]
    assert row["extra_info"]["answer"] == "Think.\n#### 1,005"


def test_of_a_single_file_a_part_is_held_out(tmp_path: Path):
    source = lines(tmp_path / "data.jsonl", make(20))
    paths = prepare_data(
        "gsm8k", tmp_path / "out", source=str(source), num_train=9, num_val=5, seed=3
    )
    train, val = questions(paths["train"]), questions(paths["val"])
    assert (len(train), len(val)) == (9, 5)
    assert not set(train) & set(val)
    tenth = prepare_data("gsm8k", tmp_path / "out", source=str(source))
    assert (len(questions(tenth["train"])), len(questions(tenth["val"]))) == (18, 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": "no number"}, "row 0: .*ends in"),
        ({"question": "q"}, "expected a column 'answer'"),
    ],
)
def test_rows_that_are_not_gsm8k(tmp_path: Path, row: dict, message: str):
    with pytest.raises(DataError, match=message):
        prepare_data("gsm8k", tmp_path / "out", source=str(lines(tmp_path / "data.jsonl", [row])))


def test_a_folder_without_such_files(tmp_path: Path):
    lines(tmp_path / "train.jsonl", make(1))
    with pytest.raises(DataError, match=r"with train\.jsonl, expected a file, or a folder"):
        prepare_data("gsm8k", tmp_path / "out", source=str(tmp_path))


def dot() -> bytes:
    """A file of a picture."""
    file = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(file, "PNG")
    return file.getvalue()


SOLUTION = "Half of $1$ is $\\frac{1}{2}$, and so it is $\\boxed{\\frac{1}{2}}$."
HELLASWAG = {
    "ind": 4,
    "activity_label": "Removing ice from car",
    "ctx_a": "A man",
    "ctx_b": "then",
    "ctx": "[header] A man writes on snow. then",
    "endings": [", he sings.", ", he [step] scrapes it off.", "he flies.", "he sleeps."],
    "source_id": "activitynet~v_-1IBHYS3L-Y",
    "split": "train",
    "split_type": "indomain",
    "label": "1",
}
# Of each name a row as it is published, a right response and a wrong one.
ROWS = {
    "gsm8k": (make(1)[0], "So it is\n#### 1000", "#### 10"),
    "gsm8k_tools": (make(1)[0], "So it is\n#### 1000", "#### 10"),
    "math": (
        {"problem": "Half of 1?", "level": "Level 2", "type": "Algebra", "solution": SOLUTION},
        "It is \\boxed{0.5}",
        "\\boxed{5}",
    ),
    "geometry3k": (
        {
            "images": [{"bytes": dot(), "path": None}],
            "problem": "<image>Find x.",
            "answer": "2 \\sqrt { 3 }",
        },
        "<think>.</think> \\boxed{\\sqrt{12}}",
        "<think>.</think> \\boxed{3}",
    ),
    "hellaswag": (HELLASWAG, "B", "A"),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_grader_of_its_data_source_tells_right_from_wrong(tmp_path: Path, name: str):
    row, right, wrong = ROWS[name]
    pq.write_table(pa.Table.from_pylist([row] * 3), tmp_path / "data.parquet")
    [_, written] = read(
        prepare_data(name, tmp_path / "out", source=str(tmp_path / "data.parquet"))["train"]
    )
    scores = [
        default_compute_score(
            written["data_source"],
            response,
            written["reward_model"]["ground_truth"],
            written["extra_info"],
        )["score"]
        for response in (right, wrong)
    ]
    assert scores[0] == 1.0 > scores[1] + 0.5
    text = written["prompt"][-1]["content"]
    if name == "geometry3k":
        assert text.startswith("<image>Find x.") and written["images"] == [{"bytes": dot()}]
    if name == "hellaswag":
        assert text.startswith(
            "Removing ice from car: A man writes on snow. then\n\nA. , he sings.\nB. , he scrapes"
        )
    if name == "gsm8k_tools":
        assert [one["role"] for one in written["prompt"]] == ["system", "user"]


def test_pairs_of_two_responses_to_one_prompt(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Packed lines in two folders, as they are published; what is no pair is left out and counted."""
    start = "\n\nHuman: 1+1=\n\nAssistant: 2\n\nHuman: 2+3="
    rows = [
        {"chosen": f"{start}\n\nAssistant: 5", "rejected": f"{start}\n\nAssistant: 6"},
        {"chosen": f"{start}\n\nAssistant: 5", "rejected": f"{start}\n\nAssistant: 5"},
        {"chosen": f"{start}\n\nAssistant: 5", "rejected": "\n\nHuman: 3+3=\n\nAssistant: 6"},
        {"chosen": f"{start}\n\nAssistant:", "rejected": f"{start}\n\nAssistant: 5"},
        {
            "chosen": f"\n\nHuman: Hi{start}\n\nAssistant: 5",
            "rejected": f"\n\nHuman: Hi{start}\n\nAssistant: 6",
        },
    ]
    for split in ("train", "test"):
        (tmp_path / "helpful-base").mkdir(exist_ok=True)
        with gzip.open(tmp_path / "helpful-base" / f"{split}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    paths = prepare_data("hh_rlhf", tmp_path / "out", source=str(tmp_path))
    assert (
        "train.jsonl.gz: 4 of 5 rows are left out: the two chats do not differ"
        in capsys.readouterr().out
    )
    [row] = read(paths["val"])
    assert [message["content"] for message in row["prompt"]] == ["1+1=", "2", "2+3="]
    tokenizer = build_tokenizer()
    item = RMDataset(
        str(paths["train"]), tokenizer, DataConfig(max_length=64, cache_dir=str(tmp_path))
    )[0]
    begin = int(item["num_prompt_tokens"])
    assert [tokenizer.decode(ids[begin : begin + 1]) for ids in item["input_ids"]] == ["5", "6"]


def test_a_split_has_another_name_and_rows_without_a_label(tmp_path: Path):
    """Of hellaswag the test split has no labels: the validation split is held out."""
    for split, label in (("train", "1"), ("validation", "0"), ("test", "")):
        lines(tmp_path / f"hellaswag_{split}.jsonl", [HELLASWAG | {"label": label}])
    paths = prepare_data("hellaswag", tmp_path / "out", source=str(tmp_path))
    assert [read(path)[0]["reward_model"]["ground_truth"] for path in paths.values()] == ["B", "A"]


def test_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Images stay the bytes that they are stored as."""
    # Not imported where tests are collected, which every process does.
    datasets = import_module("datasets")
    features = datasets.Features(
        {
            "images": [datasets.Image()],
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    split = datasets.Dataset.from_list([ROWS["geometry3k"][0]], features=features)
    loaded = datasets.DatasetDict(train=split, validation=split, test=split)
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *name: loaded if name == ("hiyouga/geometry3k", None) else None,
    )
    paths = prepare_data("geometry3k", tmp_path)
    assert [read(path)[0]["images"] for path in paths.values()] == [[{"bytes": dot()}]] * 2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "geometry3k",
            {"images": [{"path": "../x.png"}]},
            r"row 0, column 'images': got .*a file below",
        ),
        ("geometry3k", {"problem": "Find x."}, "row 0: got 0 times <image> and 1 images"),
        ("hellaswag", {"label": "4"}, "row 0: got the label '4'"),
        ("math", {"problem": None}, "row 0, column 'problem': got None, expected text"),
        ("math", {"solution": "no box"}, "no rows for train.parquet"),
    ],
)
def test_rows_that_are_wrong(tmp_path: Path, name: str, change: dict, message: str):
    pq.write_table(pa.Table.from_pylist([ROWS[name][0] | change]), tmp_path / "data.parquet")
    with pytest.raises(DataError, match=message):
        prepare_data(name, tmp_path / "out", source=str(tmp_path / "data.parquet"))
