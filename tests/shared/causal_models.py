"""Every causal class of transformers, as small as one set of sizes makes it."""

import inspect

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

SIZES = {
    8: "head_dim rotary_dim mamba_d_state state_size qk_rope_head_dim qk_nope_head_dim v_head_dim",
    16: "q_lora_rank kv_lora_rank mamba_d_head moe_intermediate_size shared_expert_intermediate_size",
    32: "hidden_size n_embd d_model dim embed_dim emb_dim embedding_size d_embed attention_hidden_size",
    64: "intermediate_size ffn_dim d_ff dff n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size vocab_size "
    "max_position_embeddings n_positions n_ctx",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads mamba_n_heads "
    "num_key_value_heads num_kv_heads num_experts num_local_experts n_routed_experts",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers "
    "num_decoder_layers num_experts_per_tok expand num_codebooks eos_token_id",
    1: "n_group topk_group bos_token_id",
    0: "pad_token_id",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
SMALL |= {"use_cache": False, "use_mamba_kernels": False}
OWN = {
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Mamba2ForCausalLM": {"num_heads": 8, "n_groups": 1},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
MOST_PARAMETERS = 30_000_000
CONFIGS = {
    kind.__name__: config
    for config, kinds in MODEL_FOR_CAUSAL_LM_MAPPING.items()
    for kind in (kinds if isinstance(kinds, tuple | list) else (kinds,))
}
KINDS = {
    kind.__name__: kind
    for kinds in MODEL_FOR_CAUSAL_LM_MAPPING.values()
    for kind in (kinds if isinstance(kinds, tuple | list) else (kinds,))
}


def small_config(kind, config_class):
    config = config_class()
    known = set(inspect.signature(config_class.__init__).parameters) | set(vars(config)) | set(config.attribute_map)
    given = {name: value for name, value in SMALL.items() if name in known}
    config = config_class(**given | OWN.get(kind.__name__, {}))
    text = getattr(config, "text_config", None)
    if isinstance(text, PretrainedConfig) and kind.config_class is type(text) is not config_class:
        return small_config(kind, type(text))
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def small_model(kind, config_class):
    config = small_config(kind, config_class)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    return kind(config).eval().float()
