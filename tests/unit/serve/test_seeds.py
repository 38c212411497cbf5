# SPDX-License-Identifier: Apache-2.0
"""Seeds of calls: they depend on the session, the prompt and its number alone."""

from quadriga.serve.seeds import Seeds


def test_seeds_do_not_depend_on_the_order_of_arrival() -> None:
    """Each call of a prompt differs, and so does each session; the order of prompts changes none."""
    calls = [("a", (1, 2)), ("b", (1, 2)), ("a", (3,)), ("a", (1, 2)), ("", (12,))]
    seeds = Seeds(7)
    first = [seeds.ask(session, prompt).seed for session, prompt in calls]
    assert len(set(first)) == len(calls)
    seeds = Seeds(7)
    order = [4, 1, 2, 0, 3]
    again = {n: seeds.ask(*calls[n]).seed for n in order}
    assert [again[n] for n in range(len(calls))] == first
    assert Seeds(8).ask(*calls[0]).seed not in first


def test_a_repeated_call_has_the_same_seed() -> None:
    """A call that was lost gives its number back; a client that says so repeats its last one."""
    seeds = Seeds(7)
    lost = seeds.ask("a", [1])
    answered = seeds.ask("a", [1])
    lost.give_back()
    assert seeds.ask("a", [1]).seed == lost.seed
    assert seeds.ask("a", [1], is_retry=True).seed == answered.seed
    assert seeds.ask("a", [1]).seed not in (lost.seed, answered.seed)
