"""LLM and a server on meshes give what they give on one device: with groups of devices, and with a user's own rules."""

import concurrent.futures

import httpx
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxinfer.api import LLM
from jaxinfer.types import SamplingParams
from tests.api.test_serve_process import Serving, save_tiny_model

pytestmark = pytest.mark.long
FLAGS = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--page-size", "8", "--api-server-count", "1")
PROMPTS = ["abc", "the same words", "the same words, and more", "x", "the same", "z y x w"]
ASKS = [
    {"prompt": p, "max_tokens": 9, "temperature": t, "seed": 3, "ignore_eos": True} for p in PROMPTS for t in (0, 1)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("meshes") / "model")


@pytest.fixture
def answers(model, tmp_path):
    """The texts of all asks, asked at once, of a server with some flags; and its metrics."""

    def answers(*flags):
        log = tmp_path / f"{len(flags)}.log"
        server = Serving(log, str(model), *FLAGS, "--compile-cache-dir", "", *flags, JAX_NUM_CPU_DEVICES="4")
        try:
            server.wait_until_ready()
            with concurrent.futures.ThreadPoolExecutor(len(ASKS)) as pool:

                def ask(body):
                    return httpx.post(server.url + "/v1/completions", json=body, timeout=120).json()

                found = [reply["choices"][0]["text"] for reply in pool.map(ask, ASKS)]
            return found, httpx.get(server.url + "/metrics", timeout=30).text
        finally:
            server.close()

    return answers


def counted(metrics, *names):
    lines = metrics.splitlines()
    return [float(next(line for line in lines if line.startswith("jaxinfer:" + name)).split()[-1]) for name in names]


def test_a_server_of_two_groups_answers_as_one_device_does_and_counts_what_all_have_done(answers):
    names = ("prompt_tokens_total", "generation_tokens_total", "num_requests_running", "num_requests_waiting")
    one, alone = answers()
    two, together = answers("--mesh", "data=2,tensor=2", "--rules", "data-attention")
    assert two == one and len(set(one)) > 6
    assert counted(together, *names) == counted(alone, *names)


def test_llm_takes_a_mesh_of_any_devices_and_rules_of_the_users_own(model):
    if jax.device_count() < 4:
        pytest.skip(f"{jax.device_count()} devices; 4 are needed")
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 8, "compile_cache_dir": ""}
    sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=5, ignore_eos=True)
    mesh = Mesh(np.asarray(jax.devices()[3::-1]).reshape(2, 2), ("mine", "yours"))
    rules = {"rows": "mine", "tokens": "yours", "vocab": ()}
    found = []
    for how in ({}, {"mesh": mesh, "rules": rules}):
        llm = LLM(str(model), show_progress=False, **options, **how)
        found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, sampling)])
        stats, info = llm.stats(), llm.info
        llm.close()
    assert found[0] == found[1]
    assert info.max_num_seqs == 4 and stats.num_pages == info.num_pages
