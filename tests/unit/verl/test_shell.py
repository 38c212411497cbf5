# SPDX-License-Identifier: Apache-2.0
"""Shell scripts: which commands they start, with which words, and what is said where that is not known."""

import random
from contextlib import suppress
from pathlib import Path

import pytest

from quadriga.cli.main import main
from quadriga.errors import ConfigError
from quadriga_verl.commands.shell import find_commands, find_program

SCRIPT = r"""
set -xeuo pipefail
mode=${mode:-spmd}
if [ "$mode" = "spmd" ]; then
  COMMAND="torchrun --standalone --nnodes=${NNODES:-1} --nproc-per-node=${NUM:-4} -m verl.trainer.sft_trainer"
elif [ "$mode" = other ]; then
  COMMAND="python -m elsewhere"
else
  COMMAND="python -m nowhere"
fi
len=$((1024 * (2 + 3)))
half=$((len / 2))   # a comment, it's one
DATA=${DATA_HOME:-"${HOME}/verl"}
name="$(basename "Qwen/Qwen2.5")-x"
CONFIG="\
    optim.betas="[0.9,0.95]" \
    engine=fsdp"
params=(
    data.train_files="${DATA}/gsm8k/train.parquet"   # another
    data.val_files="['a.parquet', 'b.parquet']"
    trainer.logger=['console','wandb']
)
params+=(x.y=${len})
[ "$mode" == spmd ] && extra=yes
cat <<EOF > file
$COMMAND is=text
EOF
PYTHONUNBUFFERED=1 $COMMAND \
    "${params[@]}" \
    ${CONFIG} a.half=$half \
    trainer.experiment_name=${name} e="" extra=${extra:-no} $@ 2>&1 | tee log.txt
"""


def words_of(text: str, **environment: str) -> list[str]:
    """Of the last command but what is behind a pipe."""
    *_, command = [one for one in find_commands(text, environment) if one.words[:1] != ["tee"]]
    assert command.problems == []
    return command.words


def problems_of(text: str) -> list[str]:
    return find_commands(text, {})[-1].problems


def test_a_script_is_read_as_a_shell_reads_it() -> None:
    assert words_of(SCRIPT, HOME="/h") == [
        "torchrun", "--standalone", "--nnodes=1", "--nproc-per-node=4", "-m", "verl.trainer.sft_trainer",
        "data.train_files=/h/verl/gsm8k/train.parquet", "data.val_files=['a.parquet', 'b.parquet']",
        "trainer.logger=[console,wandb]", "x.y=5120", "optim.betas=[0.9,0.95]", "engine=fsdp", "a.half=2560",
        "trainer.experiment_name=Qwen2.5-x", "e=", "extra=yes",
    ]  # fmt: skip
    assert words_of(SCRIPT, HOME="/", mode="other", DATA_HOME="/d")[:4] == [
        "python", "-m", "elsewhere", "data.train_files=/d/gsm8k/train.parquet",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run a=$X b=${Y} c=${Z:-z}", ["X is not set (line 1)", "Y is not set (line 1)"]),
        (
            "for i in 1 2; do\n X=$i\ndone\nrun $X",
            ["X is set in line 2, under a condition that is not decided here"],
        ),
        (
            "f() {\n X=1\n}\nrun ${X:-2}",
            ["X is set in line 2, under a condition that is not decided here"],
        ),
        (
            "case $1 in\n a) X=1;;\nesac\nrun $X",
            ["X is set in line 2, under a condition that is not decided here"],
        ),
        (
            "if [ -f /x ]; then X=1; fi\nrun $X",
            ["X is set in line 1, under a condition that is not decided here"],
        ),
        ("X=$(nvidia-smi -L)\nrun $X", ["$(nvidia-smi -L) is not run here (line 1)"]),
        ("X=a\nrun ${X%%b}", ["${X%%b} has a form that is not supported (line 2)"]),
        ("run a\nrun X=(a)", ["X=(...) is an argument of a command (line 2)"]),
        ("exit 1\nrun a", ["the script ends in line 1, before this command"]),
        (
            "for i in 1 2; do\n run a=1\ndone",
            ["it is in a loop, a function or under a condition that is not decided here"],
        ),
    ],
)
def test_what_is_not_known_is_told_by_line(text: str, said: list[str]) -> None:
    assert problems_of(text) == said


CASE = """
case "$MODEL" in
  small|tiny) SIZE=1 ;;
  b*)
    SIZE=2
    ;;
  none) ;;
  *) SIZE=3;;
esac
run size=$SIZE
"""


@pytest.mark.parametrize(
    ("model", "size"), [("tiny", "1"), ("big", "2"), ("other", "3"), ("none", "0")]
)
def test_a_case_is_followed(model: str, size: str) -> None:
    assert words_of(f"SIZE=0{CASE}", MODEL=model) == ["run", f"size={size}"]


def test_the_environment_decides_what_a_script_does_not() -> None:
    text = "N=$(nvidia-smi -L | wc -l)\nfor i in 1 2; do LR=$i; done\nB=4\nrun n=$N lr=$LR b=$B"
    (command,) = [
        one for one in find_commands(text, {"N": "8", "LR": "1e-5", "B": "5"}) if one.words
    ]
    assert command.words == ["run", "n=8", "lr=1e-5", "b=4"]
    assert command.notices == [
        "N (line 1) is the environment's.",
        "LR (line 2) is the environment's.",
    ]


def test_an_apostrophe_between_double_quotes_is_a_character() -> None:
    assert words_of("""run "it's" '"' "'$X'" """, X="b c") == ["run", "it's", '"', "'b c'"]


@pytest.mark.parametrize("text", ['run "b\n', "X=(a b\n"])
def test_a_quote_or_bracket_without_its_end_is_told_by_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2: got a quote or bracket without its end"):
        find_commands(f"run a\n{text}", {})


def test_any_text_is_read_or_refused() -> None:
    """Random fragments of scripts: an error is a ConfigError, never a traceback."""
    fragments = [
        "'", '"', "$", "{", "}", "(", ")", "`", "\\", "a", "X=", "X=(", "$X", "${X}", "${X:-b}", "$(echo",
        "$((1+2))", "[", "]", "[[", "if", "then", "fi", "for", "do", "done", "case", "esac", ";", ";;",
        "&&", "||", "|", "&", ">", "<<EOF", "EOF", "export", "#", "it's", "2>&1", "+=", "==", "-z", "!",
        "${X[@]}", "${#X}", "${X%.*}", "$@", "$1", "f()",
    ]  # fmt: skip
    draw = random.Random(5)
    num_read = 0
    for _ in range(2000):
        text = "".join(
            draw.choice(fragments) + draw.choice(["", " ", "\n"])
            for _ in range(draw.randint(1, 14))
        )
        with suppress(ConfigError):
            find_commands(text, {})
            num_read += 1
    assert num_read > 200


def test_words_behind_a_launcher() -> None:
    sizes = ["--nnodes", "2", "--nproc_per_node=8"]
    assert find_program(["torchrun", *sizes, "-m", "verl.trainer.sft_trainer", "a=1"]) == (
        "verl.trainer.sft_trainer", ["trainer.nnodes=2", "trainer.n_gpus_per_node=8", "a=1"],
    )  # fmt: skip
    assert find_program(["python3", "-u", "recipe/dapo/main_dapo.py", "a=1"]) == (
        "recipe/dapo/main_dapo.py",
        ["a=1"],
    )
    ray = [
        "ray",
        "job",
        "submit",
        "--working-dir",
        ".",
        "--",
        "python3",
        "-m",
        "recipe.dapo.main_dapo",
        "a=1",
    ]
    assert find_program(ray) == ("recipe.dapo.main_dapo", ["a=1"])
    assert find_program(["mkdir", "-p", "x"]) is None


def test_a_script_becomes_a_commented_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text("LR=2e-5\ntorchrun --nproc_per_node=2 -m verl.trainer.sft_trainer optim.lr=$LR model.path=m \\\n"
                      " optim.clip_grad=0.5 trainer.seed=1 model.use_remove_padding=True\n")  # fmt: skip
    assert main(["config", "translate", str(script)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"# {script}, line 2: sft_trainer of verl. `quadriga sft --config THIS_FILE`"
    assert "  grad_clip: 0.5  # optim.clip_grad" in lines
    assert "  lr: 2.0e-05" in lines
    assert "  n_gpus_per_node: 2" in lines
    assert lines[1] == "# Left out, for they have the defaults: trainer.seed"
    written = tmp_path / "ours.yaml"
    written.write_text("\n".join(lines))
    assert main(["sft", "--config", str(written), "--show"]) == 0
    script.write_text("python -m verl.trainer.main_ppo a=$NAME\npython -m verl.trainer.main_eval\n")
    assert main(["config", "translate", str(script)]) == 2
    assert (
        "got commands of verl in lines 1, 2, expected one. Name one with --line"
        in capsys.readouterr().err
    )
    assert main(["config", "translate", str(script), "--line", "1"]) == 2
    assert "NAME is not set (line 1)" in capsys.readouterr().err
