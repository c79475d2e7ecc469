"""Plans a small sparse model on four H200s that are not there, with its steps compiled; prints the report as JSON.

JAX_PLATFORMS=cpu python compile_plan.py TARGET_CONFIG
"""

import json
import sys
from pathlib import Path

from jaxinfer.sharding import report

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}

if __name__ == "__main__":
    target = Path(sys.argv[1]).read_text()
    load = report.Load(num_seqs=16, tokens_per_seq=1024)
    print(json.dumps(report.as_json(report.plan(CONFIG, {"expert": 2, "tensor": 2}, load=load, target_config=target))))
