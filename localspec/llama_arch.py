"""What llama.cpp of llama-cpp-python 0.3.36 knows, as data: architectures, what they can do, file types, tokenizers.

Facts of an interface, taken from that version (src/llama-arch.cpp, include/llama.h). A test compares what can be
compared with the library that is installed.
"""

from __future__ import annotations

LLAMA_CPP = "llama.cpp (llama-cpp-python 0.3.36)"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Draft heads that only work on top of a target's hidden states, and the drafter that each of them wants.
DRAFT_HEADS = {"eagle3": "eagle3", "dflash": "dflash", "gemma4-assistant": "mtp"}

# Our ways of drafting, as `llama-server --spec-type` calls the same thing. A dflash file with a Markov head is "dspark".
SPEC_TYPES = {
    "lm": "draft-simple", "eagle3": "draft-eagle3", "dflash": "draft-dflash", "dspark": "draft-dspark", "mtp": "draft-mtp",
    "ngram": "ngram-simple",
}  # fmt: skip

# Nothing to predict a next token with: one vector per text.
ENCODER_ONLY = _names(
    """
    bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert t5encoder gemma-embedding
    llama-embed
    """
)

# Text goes in through an encoder, or does not come out from left to right, or isn't text: the loop here can't run them.
ENCODER_DECODER = _names("t5")
DIFFUSION = _names("dream llada llada-moe rnd1")
SPEECH = _names("wavtokenizer-dec qwen3tts pockettts")

# Sequence state of a fixed size instead of a cache: nothing can be cut off its end, only an older one put back.
RECURRENT = _names("mamba mamba2 rwkv6 rwkv6qwen2 rwkv7 arwkv7")
HYBRID = _names(
    """
    jamba falcon-h1 plamo2 granitehybrid lfm2 lfm2moe nemotron_h nemotron_h_moe qwen3next kimi-linear bailingmoe3
    kimi-k3 glm5-next qwen35 qwen35moe qwen4exp deepseek4 minimax-01
    """
)

# Of these, graphs that can keep the states after each of the last tokens (llm_arch_supports_rs_rollback in llama-arch.cpp).
BOUNDED_ROLLBACK = _names(
    "kimi-k3 qwen35 qwen35moe qwen4exp deepseek4 glm5-next nemotron_h nemotron_h_moe lfm2 lfm2moe bailingmoe3"
)

# Graphs that mark the input of every layer (t_layer_inp in src/models/*.cpp), so that llama.cpp hands it over. Asking on any
# other graph aborts the process.
LAYER_INPUTS = _names(
    """
    llama qwen3 qwen3moe qwen3next qwen35 qwen35moe gemma4 gpt-oss lfm2 lfm2moe hunyuan_vl hunyuan-dense nemotron_h
    nemotron_h_moe mimo2 minimax-01 minimax-m2 muse-glimmer nanbeige bailingmoe3
    """
)

# Graphs that give the state which a next-token (NextN, MTP) head reads (t_h_nextn in src/models/*.cpp), and which of
# them have such a head's graph, for one inside the target's own file.
NEXTN_HEADS = _names("cohere2moe deepseek2 deepseek32 glm-dsa glm4moe hy_v3 mimo2 qwen35 qwen35moe qwen3next step35")
NEXTN_STATES = NEXTN_HEADS | {"gemma4"}

# Every architecture that this version has a graph for (it knows the name "gptj", but has no graph).
KNOWN = (
    _names(
        """
        llama llama4 deci falcon grok gpt2 gptneox mpt baichuan starcoder refact bloom stablelm qwen qwen2 qwen2moe
        qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe phi2 phi3 phimoe plamo plamo3 codeshell orion internlm2 minicpm
        minicpm3 gemma gemma2 gemma3 gemma3n gemma4 starcoder2 maple xverse command-r cohere2 cohere2moe dbrx olmo olmo2
        olmoe muse-glimmer openelm arctic deepseek deepseek2 deepseek2-ocr deepseek32 chatglm glm4 glm4moe glm-dsa
        bitnet jais jais2 nemotron exaone exaone4 exaone-moe granite granitemoe graniteswitch granite_swa chameleon plm
        bailingmoe bailingmoe2 dots1 dots3note arcee afmoe laguna ernie4_5 ernie4_5-moe hunyuan-moe hunyuan-dense
        hunyuan_vl hy_v3 hy_v4 smollm3 gpt-oss smallthinker seed_oss grovemoe apertus hrm_text minimax-m2 minimax-m3
        cogvlm pangu-embedded mistral3 mistral4 paddleocr mimo2 step35 spark2_5 maincoder talkie mellum nanbeige
        """
    )
    | frozenset(DRAFT_HEADS)
    | ENCODER_ONLY
    | ENCODER_DECODER
    | DIFFUSION
    | SPEECH
    | RECURRENT
    | HYBRID
)

# general.file_type: the recipe of a quantisation. A file may mix types; the tensors say which.
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4", 39: "NVFP4", 40: "Q1_0",
    41: "Q2_0",
}  # fmt: skip

TOKENIZER_MODELS = _names("llama bert gpt2 hybriddna whitespace t5 rwkv test plamo2 gemma4 no_vocab none")

# Ids that llama.cpp assumes where a file names none: (bos, eos) by tokenizer.ggml.model.
DEFAULT_BOS_EOS: dict[str, tuple[int | None, int | None]] = {
    "llama": (1, 2), "gpt2": (11, 11), "hybriddna": (11, 11), "whitespace": (11, 11), "bert": (101, None),
    "t5": (None, 1), "plamo2": (1, 2),
}  # fmt: skip

# Pre-tokenizers with which a beginning-of-sequence token is put first unless the file says no.
ADD_BOS_PRE = _names(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken chameleon gemma4"
)

ROPE_SCALING = _names("none linear yarn longrope")
MAX_LAYERS = 512
MAX_EXPERTS = 1024
