# SPDX-License-Identifier: Apache-2.0
"""`quadriga generate`: ask a model, a run or a checkpoint."""

import argparse
from collections.abc import Sequence

from quadriga.cli.config import add_config_arguments, load_from, print_notices
from quadriga.trainer.checkpoint import model_folder
from quadriga.trainer.evaluate import answer


def main(argv: Sequence[str]) -> int:
    """Print the answers to one or more prompts."""
    parser = argparse.ArgumentParser(prog="quadriga generate", description=__doc__)
    parser.add_argument("model", help="a Hugging Face folder or name, a run's directory, or one of its global_step_N")
    parser.add_argument("--prompt", action="append", required=True, help="what the user says; may be repeated")
    parser.add_argument("--system", help="a system message (default: the chat template's own)")
    add_config_arguments(parser)
    arguments = parser.parse_intermixed_args(list(argv))
    arguments.overrides.append(f"actor_rollout_ref.model.path={model_folder(arguments.model)}")
    loaded = load_from(arguments)
    print_notices(loaded.notices)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    chats = [[*system, {"role": "user", "content": prompt}] for prompt in arguments.prompt]
    for prompt, texts in zip(arguments.prompt, answer(loaded.config, chats), strict=True):
        print(f"> {prompt}")
        for text in texts:
            print(text)
    return 0
