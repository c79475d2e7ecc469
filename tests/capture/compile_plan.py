"""Plans a small sparse model on four H200s that are not there, with its steps compiled; prints the report as JSON.

JAX_PLATFORMS=cpu python compile_plan.py TARGET_CONFIG MESH RULES
"""

import json
import sys
from pathlib import Path

from jaxinfer.sharding import mesh, report

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
    target, sizes, rules = Path(sys.argv[1]).read_text(), mesh.parse(sys.argv[2]), sys.argv[3]
    load = report.Load(num_seqs=16, tokens_per_seq=1024)
    print(json.dumps(report.as_json(report.plan(CONFIG, sizes, axis_rules=rules, load=load, target_config=target))))
