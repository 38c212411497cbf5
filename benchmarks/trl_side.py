# SPDX-License-Identifier: Apache-2.0
"""TRL's side of the step benchmark: `GRPOTrainer` as its documentation runs it, one optimizer step per order.

Runs in TRL's own environment (`step.py --install` makes it); the protocol stands in side.py. The settings give TRL the
shape of the quickstart and take nothing from its speed:

- gradient checkpointing off (TRL's default is on, which costs another forward pass);
- `beta=0` and one optimizer step per batch of samples: TRL needs no reference or old log-probs and computes none;
- `top_k=0`, `top_p=1`: no filtering of the distribution on either side;
- `min_new_tokens` equal to the maximum, so that every completion has the same length on both sides;
- bfloat16 is autocast over float32 weights, TRL's default: the optimizer's weights are float32 on both sides.
"""

import time
from typing import Any

import datasets
import torch
import transformers
import trl

import workload
from side import Driver, Stopwatch, arguments


class TimedTrainer(trl.GRPOTrainer):
    """`GRPOTrainer` with a clock around generation and around generation with scoring. It changes no computation."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        self.sums = dict.fromkeys(("gen_s", "rollout_s", "response_tokens", "prompt_tokens"), 0)
        super().__init__(*positional, **named)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *rest: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_single_turn(prompt_ids, *rest, **named)
        self.sums["gen_s"] += time.perf_counter() - start
        self.sums["response_tokens"] += sum(len(ids) for ids in result[0])
        self.sums["prompt_tokens"] += sum(len(ids) for ids in prompt_ids)
        return result

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_and_score_completions(inputs)
        self.sums["rollout_s"] += time.perf_counter() - start
        return result


class OnOrder(transformers.TrainerCallback):
    """Holds the trainer before each step until the driver asks for it, and answers after it."""

    def __init__(self, driver: Driver, sums: dict[str, float], rewards: list[float]) -> None:
        self.driver, self.sums, self.rewards = driver, sums, rewards
        self.watch = Stopwatch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        """Wait for the order; generation happens after this, inside the step."""
        if not self.driver.wants_step():
            # The trainer has no way to leave before a step: it would run this one first.
            raise SystemExit(0)
        self.sums.update(dict.fromkeys(self.sums, 0))
        self.rewards.clear()
        self.watch = Stopwatch()
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        """The optimizer has stepped and the gradients are gone: answer."""
        clock = self.watch.read()
        self.driver.send(
            "step",
            **clock,
            gen_s=self.sums["gen_s"],
            train_s=clock["total_s"] - self.sums["rollout_s"],
            response_tokens=int(self.sums["response_tokens"]),
            prompt_tokens=int(self.sums["prompt_tokens"]),
            reward=sum(self.rewards) / max(1, len(self.rewards)),
        )
        return control


def build(args: Any, driver: Driver) -> TimedTrainer:
    """The trainer, with the callback that makes it wait for the driver and answer it."""
    score, rewards = workload.SCORES[args.reward], []

    def reward(completions: list[Any], answer: list[str], **rest: Any) -> list[float]:
        scores = [
            score(turns[0]["content"], right)
            for turns, right in zip(completions, answer, strict=True)
        ]
        rewards.extend(scores)
        return scores

    rows = [
        {"prompt": [{"role": "user", "content": question.text}], "answer": question.answer}
        for question in workload.questions(args.steps + 1)
    ]
    config = trl.GRPOConfig(
        output_dir=args.scratch,
        use_cpu=not torch.accelerator.is_available(),
        bf16=args.dtype == "bfloat16",
        model_init_kwargs={"dtype": "bfloat16" if args.bf16_weights else "float32"},
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=workload.NUM_SEQUENCES // args.micro_batch,
        num_generations=workload.NUM_SAMPLES,
        max_completion_length=args.new_tokens,
        generation_kwargs={"min_new_tokens": args.new_tokens},
        temperature=workload.TEMPERATURE,
        top_k=0,
        top_p=1.0,
        num_iterations=1,
        beta=0.0,
        scale_rewards="group",
        loss_type="dapo",
        shuffle_dataset=False,
        learning_rate=workload.LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=workload.ADAM_BETAS[0],
        adam_beta2=workload.ADAM_BETAS[1],
        max_grad_norm=workload.MAX_GRAD_NORM,
        weight_decay=0.0,
        max_steps=args.steps,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    data = datasets.Dataset.from_list(rows)
    trainer = TimedTrainer(model=args.model, reward_funcs=reward, args=config, train_dataset=data)
    trainer.add_callback(OnOrder(driver, trainer.sums, rewards))
    return trainer


def main() -> None:
    """Build the trainer, say that it is ready, and let it train on orders."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--micro-batch", type=int, default=64, help="sequences of one forward and backward pass"
    )
    parser.add_argument(
        "--bf16-weights", action="store_true", help="weights in bfloat16, optimizer included"
    )
    args, driver, watch = parser.parse_args(), Driver(), Stopwatch()
    trainer = build(args, driver)
    driver.send(
        "ready",
        package=f"trl {trl.__version__}",
        setup_s=watch.read()["total_s"],
        torch=torch.__version__,
        transformers=transformers.__version__,
        threads=torch.get_num_threads(),
        weights=str(trainer.model.dtype).removeprefix("torch."),
        autocast=bool(trainer.args.bf16),
        micro_batch=args.micro_batch,
    )
    trainer.train()


if __name__ == "__main__":
    main()
