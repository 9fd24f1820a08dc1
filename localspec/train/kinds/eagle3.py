"""Settings of EAGLE-3."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.train.settings import setting

MAX_TTT = 64  # tokens that --spec-draft-n-max allows


@dataclass(frozen=True)
class Settings:
    """Of EAGLE-3 alone."""

    ttt: int = setting(4, "Steps of the training-time test: tokens in a row that it learns to draft.", at_least=1,
                       at_most=MAX_TTT)  # fmt: skip
    draft_vocab: int = setting(8192, "Tokens that the draft can say, the most frequent ones; 0: all.", at_least=0)
    n_ff: int = setting(0, "Width of the feed-forward layer; 0: the target's.", at_least=0)
    window: int = setting(1024, "Positions that its attention sees; 0: all.", at_least=0)
    chains: str = setting("kept", "kept: only chains right so far go on a step; all: every chain.", ("kept", "all"))
    step_decay: float = setting(1.0, "Weight of each step's loss against the step before.", at_least=0)
    noise: float = setting(0.0, "Spread of the noise added to the inputs in training, in their own spreads.", at_least=0)
    verifier: str = setting("", "The target's name on the Hugging Face Hub, or a directory: vLLM takes its embedding.")
    train_head: bool = setting(True, "Train the head; without, the target's own stays.")
