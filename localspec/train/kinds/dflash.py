"""Settings of DFlash."""

from __future__ import annotations

from dataclasses import dataclass

from localspec.train.settings import setting

MAX_BLOCK = 65  # --spec-draft-n-max allows 64 tokens


@dataclass(frozen=True)
class Settings:
    """Of DFlash alone."""

    block: int = setting(6, "Rows of a block at most; DFlash's first one is the token known.", at_least=1, at_most=MAX_BLOCK)
    layers: int = setting(2, "Layers.", at_least=1, at_most=64)
    anchors: float = setting(0.25, "Share of the places at which a block stands in a pass.", at_least=0, at_most=1)
    sizes: str = setting("random", "random: blocks of 2 rows and more; fixed: all of --block rows.", ("random", "fixed"))
    weights: str = setting("decay", "What a place in the block weighs. decay: less, the farther it is (--gamma); dpace: by "
                           "how sure the draft is up to there (D-PACE); even: all the same.",
                           ("decay", "dpace", "even"))  # fmt: skip
    gamma: float = setting(4.0, "Places over which the weight falls to 1/e.", at_least=1e-3)
    dpace_alpha: float = setting(0.5, "Least factor by which D-PACE's weight falls from place to place.",
                                 at_least=0, at_most=1)  # fmt: skip
    draft_vocab: int = setting(8192, "Tokens that the draft can say, the most frequent ones; 0: all.", at_least=0)
    n_ff: int = setting(0, "Width of the feed-forward layers; 0: the target's.", at_least=0)
    window: int = setting(1024, "Positions that its attention sees; 0: all.", at_least=0)
    full_layers: str = setting("", "Layers that see everything all the same: 0,2 for the first and the third.")
    mask_token: int = setting(-1, "Token that stands for one to be found; -1: one that no text uses.", at_least=-1)
    noise: float = setting(0.0, "Spread of the noise added to the taps in training, in their own spreads.", at_least=0)
    verifier: str = setting("", "The target's name on the Hugging Face Hub, or a directory: vLLM takes its embedding.")
    train_head: bool = setting(True, "Train the head; without, the target's own stays.")
