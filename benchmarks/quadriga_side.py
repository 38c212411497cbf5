# SPDX-License-Identifier: Apache-2.0
"""Quadriga's side of the step benchmark: the trainer of `quadriga train`, one step per order.

The protocol stands in side.py. The configuration is the quickstart's with the benchmark's prompts and reward, and
`ignore_eos` makes every completion equally long.
"""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import transformers

import quadriga
import workload
from quadriga.config import load_config
from quadriga.observe.timing import Timeline
from quadriga.trainer.build import build_run
from side import Driver, Stopwatch, arguments

# Of a micro-batch, as in the quickstart.
MAX_PACKED_TOKENS = 384
# A rendered prompt has 53 tokens; the rest is padding, which the engines never compute.
MAX_PROMPT_TOKENS = 64


def write_rows(path: Path, num_steps: int) -> None:
    """Write the benchmark's prompts in the row schema of `RLHFDataset`."""
    rows = [
        {
            "data_source": workload.DATA_SOURCE,
            "prompt": [{"role": "user", "content": question.text}],
            "ability": "comparison",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"split": "train", "index": index},
        }
        for index, question in enumerate(workload.questions(num_steps))
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def overrides(
    args: Any,
    train_file: Path,
    new_tokens: int = workload.NUM_NEW_TOKENS,
    packed_tokens: int = MAX_PACKED_TOKENS,
) -> list[str]:
    """The command line of `quadriga train` that is this benchmark."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return [
        f"data.train_files={train_file}",
        f"data.val_files={train_file}",
        f"data.train_batch_size={workload.NUM_PROMPTS}",
        f"data.max_prompt_length={MAX_PROMPT_TOKENS}",
        f"data.max_response_length={new_tokens}",
        "data.shuffle=False",
        f"data.cache_dir={args.scratch}",
        f"actor_rollout_ref.model.path={args.model}",
        f"{rollout}.name=native",
        f"{rollout}.n={workload.NUM_SAMPLES}",
        f"{rollout}.temperature={workload.TEMPERATURE}",
        f"{rollout}.ignore_eos=True",
        f"{actor}.ppo_mini_batch_size={workload.NUM_PROMPTS}",
        f"{actor}.ppo_max_token_len_per_gpu={packed_tokens}",
        f"{actor}.fsdp_config.model_dtype={args.dtype}",
        f"{actor}.optim.lr={workload.LEARNING_RATE}",
        f"{actor}.optim.betas={list(workload.ADAM_BETAS)}",
        f"{actor}.optim.weight_decay=0.0",
        f"{actor}.grad_clip={workload.MAX_GRAD_NORM}",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={Path(workload.__file__).resolve()}",
        f"custom_reward_function.name=compute_{args.reward}_score",
        f"trainer.total_training_steps={args.steps}",
        "trainer.val_before_train=False",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={args.scratch}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
    ]


def main() -> None:
    """Build the trainer, say that it is ready, and take one step per order."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--packed-tokens", type=int, default=MAX_PACKED_TOKENS, help="of a micro-batch"
    )
    args, driver, watch = parser.parse_args(), Driver(), Stopwatch()
    train_file = Path(args.scratch) / "train.parquet"
    write_rows(train_file, args.steps)
    run = build_run(
        load_config(overrides(args, train_file, args.new_tokens, args.packed_tokens)).config,
        Timeline(),
    )
    trainer = run.trainer
    driver.send(
        "ready",
        package=f"quadriga {quadriga.__version__}",
        setup_s=watch.read()["total_s"],
        torch=torch.__version__,
        transformers=transformers.__version__,
        threads=torch.get_num_threads(),
        weights=args.dtype,
    )
    for _ in range(args.steps):
        if not driver.wants_step():
            break
        watch = Stopwatch()
        trainer.train_step()
        clock, metrics = watch.read(), trainer.metrics
        before_update = sum(metrics.get(f"timing_s/{phase}", 0.0) for phase in ("gen", "reward"))
        driver.send(
            "step",
            **clock,
            gen_s=metrics["timing_s/gen"],
            train_s=clock["total_s"] - before_update,
            response_tokens=round(metrics["response_length/mean"] * workload.NUM_SEQUENCES),
            prompt_tokens=round(metrics["prompt_length/mean"] * workload.NUM_SEQUENCES),
            reward=metrics["critic/score/mean"],
        )
    run.close()


if __name__ == "__main__":
    main()
