"""Faults that somebody could make, each of which a test has to catch: `python -m tests.planted_faults [NAME ...]`.

Each fault is planted into a copy of the tree, and the tests that are to catch it run there. The table says which test
failed first. The exit status is 1 where a fault escapes, or where the text that it replaces is not in its file once.
A thinning of tests is right as long as nothing escapes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
_PACKAGES = ("kernels", "model_patches", "server")
_COPIED = (*_PACKAGES, "tests", "pyproject.toml")

# The files that faults are planted in, and those with the tests that catch them.
_PRIMITIVES = "kernels/longreach_kernels/backends/triton/primitives.py"
_FORWARD = "kernels/longreach_kernels/backends/triton/forward.py"
_DKDV = "kernels/longreach_kernels/backends/triton/backward_dkdv.py"
_DECODE = "kernels/longreach_kernels/backends/triton/decode.py"
_MASKS = "kernels/longreach_kernels/masks/mask.py"
_ROTARY = "model_patches/longreach_patches/fused/rotary_kernel.py"
_ALLOCATOR = "server/longreach/engine/kv_cache/allocator.py"
_PAGE_POOL = "server/longreach/engine/kv_cache/page_pool.py"
_PREFIX_CACHE = "server/longreach/engine/kv_cache/prefix_cache.py"
_PREFIX_SHARING = "server/longreach/engine/kv_cache/prefix_sharing.py"
_SCHEDULER = "server/longreach/engine/scheduling/scheduler.py"
_RUN_QUEUE = "server/longreach/engine/scheduling/run_queue.py"
_STATES = "server/longreach/engine/kv_cache/state_allocator.py"
_STATE_POOL = "server/longreach/engine/kv_cache/state_pool.py"
_PRIORITY = "server/longreach/engine/scheduling/priority.py"
_ADMISSION = "server/longreach/engine/admission.py"
_BATCH_BUILDER = "server/longreach/engine/device/batch_builder.py"
_SAMPLER = "server/longreach/engine/sampling/sampler.py"
_PROCESSORS = "server/longreach/engine/sampling/logit_processors.py"
_STOP = "server/longreach/text/stop.py"
_SSE = "server/longreach/api/http/sse.py"
_REQUEST_LOG = "server/longreach/api/http/request_log.py"
_USAGE = "server/longreach/api/generation/usage.py"
_RESPONSE_BUILDER = "server/longreach/api/responses/builder.py"
_RESPONSE_STORE = "server/longreach/api/service/response_store.py"
_MESSAGE_BUILDER = "server/longreach/api/generation/message_builder.py"

_RESPOND = "server/longreach/api/http/respond.py"
_UNREAD = "server/longreach/engine/unread.py"
_GRAMMAR_COMPILER = "server/longreach/api/service/grammar_compiler.py"
_ERROR_ANSWERS = "server/longreach/api/http/error_answers.py"
_TEMPLATE_VARIABLES = "server/longreach/api/service/template_variables.py"

_KERNELS, _PATCHES, _ENGINE, _API = "tests/kernels", "tests/patches", "tests/server/engine", "tests/server/api"


@dataclass(frozen=True)
class Fault:
    """A text in a file, what it is replaced by, and the tests of which one at least has to fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    Fault(
        "the causal mask is off by one",
        _PRIMITIVES,
        "allowed & (keys <= q_positions)",
        "allowed & (keys < q_positions)",
        (f"{_KERNELS}/test_portable.py::test_lengths_and_masks",),
    ),
    Fault(
        "the window is off by one",
        _PRIMITIVES,
        "(keys > q_positions - window)",
        "(keys >= q_positions - window)",
        (f"{_KERNELS}/test_portable.py::test_lengths_and_masks",),
    ),
    Fault(
        "the sinks of a window are off by one",
        _PRIMITIVES,
        "| (keys < sinks))",
        "| (keys <= sinks))",
        (f"{_KERNELS}/test_portable.py::test_lengths_and_masks",),
    ),
    Fault(
        "the last tile of keys is not masked",
        _PRIMITIVES,
        "    allowed = keys < num_keys\n    if FORM.causal:",
        "    allowed = keys < num_keys + 1\n    if FORM.causal:",
        (f"{_KERNELS}/test_portable.py::test_lengths_and_masks",),
    ),
    Fault(
        "a mask is off by one for every backend",
        _MASKS,
        "seen = k <= q if causal",
        "seen = k < q if causal",
        (f"{_KERNELS}/test_masks.py", f"{_KERNELS}/test_reference.py", f"{_KERNELS}/test_cpu.py"),
    ),
    Fault(
        "learned sinks are left out of the softmax",
        _FORWARD,
        "row_sum = row_sum * alpha + tl.exp2(sink - max_new)",
        "row_sum = row_sum * alpha",
        (f"{_KERNELS}/test_portable.py::test_softcap_and_sink_logits",),
    ),
    Fault(
        "a query head reads the keys of another group",
        _FORWARD,
        "kv_head = head // FORM.group",
        "kv_head = head % FORM.group",
        (f"{_KERNELS}/test_portable.py::test_grouped_heads_and_strides",),
    ),
    Fault(
        "the softcap is dropped",
        _PRIMITIVES,
        "logits = softcap_log2 * (1.0 - 2.0 / (tl.exp2(qk * scale_log2) + 1.0))",
        "logits = softcap_log2 * (qk * scale_log2)",
        (f"{_KERNELS}/test_portable.py::test_softcap_and_sink_logits",),
    ),
    Fault(
        "the scale of 8-bit values is not applied",
        _DECODE,
        "        out *= tl.load(VScale + kv_head)\n",
        "        out *= 1.0\n",
        (f"{_KERNELS}/test_fp8.py::test_attention_over_fp8_pages",),
    ),
    Fault(
        "splits are merged without their maxima",
        _DECODE,
        "        acc = acc * alpha + tl.sum(out * weights[:, None], 0)",
        "        acc = acc + tl.sum(out * weights[:, None], 0)",
        (f"{_KERNELS}/test_portable.py::test_more_splits_than_one_block_of_the_merge",),
    ),
    Fault(
        "a decode's window forgets its first split",
        _DECODE,
        "first = tl.maximum(low // SPLIT, sink_splits)",
        "first = tl.maximum(tl.cdiv(low, SPLIT), sink_splits)",
        (f"{_KERNELS}/test_portable.py::test_paged_decode",),
    ),
    Fault(
        "the gradient of keys reads another group's queries",
        _DKDV,
        "head = kv_head * FORM.group + ",
        "head = kv_head + ",
        (f"{_KERNELS}/test_backward.py::test_head_dims_groups_and_batches",),
    ),
    Fault(
        "positions are off by one on the fused path",
        _ROTARY,
        "cos = tl.load(Cos + token * WAVES + waves",
        "cos = tl.load(Cos + (token + 1) % tl.num_programs(0) * WAVES + waves",
        (f"{_PATCHES}/test_fused.py::test_rotary_and_page_write",),
    ),
    Fault(
        "pages of a request that was cancelled leak",
        _ALLOCATOR,
        "        pool.free(pages, hold.reserved, ",
        "        pool.free(pages[:-1], hold.reserved, ",
        (f"{_ENGINE}/test_engine.py::test_cancelling_frees_pages_at_once_and_disturbs_nobody",),
    ),
    Fault(
        "a page that a window has dropped stays in the device's table",
        _BATCH_BUILDER,
        "                self._note_change(group, slot, before, first)\n",
        "                pass\n",
        (f"{_ENGINE}/test_device_tables.py",),
    ),
    Fault(
        "a page that others hold is free",
        _PAGE_POOL,
        "left = [page for page in pages if not self._holders[page]]",
        "left = pages",
        (f"{_ENGINE}/test_histories.py", f"{_ENGINE}/test_scheduler.py"),
    ),
    Fault(
        "the prefix cache ignores the salt",
        _PREFIX_CACHE,
        "self._root(salt, contents)",
        'self._root("", contents)',
        (f"{_ENGINE}/test_prefix_cache.py", f"{_ENGINE}/test_scheduler.py::test_a_salt_separates_what_is_cached"),
    ),
    Fault(
        "a page's name ignores the page before it",
        _PREFIX_CACHE,
        "digest = hashlib.sha256(previous)",
        "digest = hashlib.sha256(self._root(salt, contents))",
        (f"{_ENGINE}/test_prefix_cache.py",),
    ),
    Fault(
        "a step writes to the slot of a state that it reads",
        _STATES,
        "        return StateSlots(hold.state.slot, hold.next)\n",
        "        return StateSlots(hold.next, hold.next)\n",
        (f"{_ENGINE}/test_state_prefixes.py",),
    ),
    Fault(
        "drafts that do not stand stay in the state",
        _STATES,
        "        if hold.state.at == end:\n",
        "        if True:\n",
        (f"{_ENGINE}/test_state_prefixes.py", f"{_ENGINE}/test_histories.py"),
    ),
    Fault(
        "a copy of a state is taken for one of the next border",
        _STATES,
        "request.hold.digests[depth - 1]\n        is_new",
        "request.hold.digests[min(depth, len(request.hold.digests) - 1)]\n        is_new",
        (f"{_ENGINE}/test_state_prefixes.py", f"{_ENGINE}/test_histories.py"),
    ),
    Fault(
        "copies of states that may be wrong stay",
        _STATES,
        "        for digest in request.hold.digests[: -(-last // self._size)]:\n",
        "        for digest in ():\n",
        (f"{_ENGINE}/test_state_prefixes.py::test_nobody_starts_from_what_a_failed_request_has_left",),
    ),
    Fault(
        "a prefix is used up to a border without a copy of the state",
        "server/longreach/engine/kv_cache/prefix_finder.py",
        "            if found is None:\n                return start\n",
        "            if found is None:\n                return border\n",
        (f"{_ENGINE}/test_state_prefixes.py", f"{_ENGINE}/test_histories.py"),
    ),
    Fault(
        "a request reads what another is about to leave a copy of",
        _PREFIX_SHARING,
        "        if ahead is request or end < start:\n",
        "        if True:\n",
        (f"{_ENGINE}/test_state_prefixes.py::test_a_shorter_question_waits_for_who_reads_the_document",),
    ),
    Fault(
        "a copy that a request starts from is evicted",
        _STATE_POOL,
        "            self._idle.leave(slot)\n        copy.pins += 1\n",
        "            pass\n        copy.pins += 1\n",
        (f"{_ENGINE}/test_state_pool.py",),
    ),
    Fault(
        "a state that comes back from the host is found before it is there",
        _STATE_POOL,
        "        self.host.restore(name, slot, partial(self._arrive, slot), is_state=True)\n",
        "        self._name(slot)\n        self.host.restore(name, slot, bool, is_state=True)\n",
        (f"{_ENGINE}/test_state_pool.py",),
    ),
    Fault(
        "what a request waits for is given up in host memory for what it pushes out",
        _PREFIX_SHARING,
        "        pool.pin_away(away.keys)\n",
        "",
        (f"{_ENGINE}/test_state_prefixes.py",),
    ),
    Fault(
        "a short first prompt leaves no copy of its state",
        _STATES,
        "if not self._copies or (chain and ",
        "if not self._copies or not chain or (chain and ",
        (f"{_ENGINE}/test_conversations.py::test_turns_of_any_length_compute_what_is_new_with_few_copies",),
    ),
    Fault(
        "all pages before a far border come back beside one step",
        _PREFIX_SHARING,
        "self._finder.places(away) > max_restored and ",
        "False and ",
        (f"{_ENGINE}/test_state_prefixes.py::test_a_copy_that_was_evicted_comes_back_from_host_memory",),
    ),
    Fault(
        "a state is given up in host memory before its last page",
        "server/longreach/engine/kv_cache/last_use.py",
        "    return page_used(use, depth - 1) - 1\n",
        "    return page_used(use, depth - 1) + 1\n",
        (f"{_ENGINE}/test_host_pages.py::test_a_state_takes_places_where_they_are_and_is_given_up_before_its_page",),
    ),
    Fault(
        "places are given away while a file is written from them",
        "server/longreach/engine/kv_cache/offload_index.py",
        "            self._left.add(kept.places)\n",
        "            self._free.extend(kept.places)\n",
        (f"{_ENGINE}/disk/test_disk_tier.py::test_what_turns_out_to_be_wrong_while_it_is_written_is_deleted",),
    ),
    Fault(
        "a file's checksum is not looked at",
        "server/longreach/engine/disk/entry_file.py",
        "    if _checksum(path.name, parts) != checksum:\n",
        "    if not checksum:\n",
        (f"{_ENGINE}/disk/test_disk_store.py::test_a_flipped_bit_anywhere_is_detected_and_costs_the_entry",),
    ),
    Fault(
        "files of other weights are used",
        "server/longreach/engine/startup/disk.py",
        "    digest.update(_weights(computing.loaded))\n",
        "",
        (f"{_ENGINE}/disk/test_disk_restart.py::test_what_does_not_match_is_not_used",),
    ),
    Fault(
        "parts of a state go to the wrong places",
        "server/longreach/engine/device/offload_store.py",
        "                done += len(part)\n",
        "                done = len(part)\n",
        (f"{_ENGINE}/test_host_pages.py::test_states_come_back_bit_by_bit_and_only_they_change",),
    ),
    Fault(
        "smaller layers find their pages at the ids of larger ones",
        "server/longreach/engine/device/batch_builder.py",
        "                new *= self._strides[group]\n",
        "",
        (f"{_ENGINE}/test_device_tables.py",),
    ),
    Fault(
        "smaller layers that share a place write to the same pages",
        "model_patches/longreach_patches/cache/pages.py",
        "[shape.place_of[layer] % shape.stride_of[layer] :]",
        "[0:]",
        (f"{_PATCHES}/test_pages.py::test_layers_of_several_sizes_share_page_ids",),
    ),
    Fault(
        "a page of an answer leaves no copy of the state",
        _STATES,
        "        if at >= request.prompt_tokens:\n            # Copies",
        "        if at >= request.prompt_tokens:\n            return False\n            # Copies",
        (f"{_ENGINE}/test_state_prefixes.py::test_a_conversation_of_ten_turns_reads_what_is_new",),
    ),
    Fault(
        "a stop string across two pieces is lost",
        _STOP,
        "        self._held = pending[len(pending) - max(self._states) :]",
        '        self._held = ""',
        (
            "tests/server/text/test_stop.py",
            f"{_API}/test_completions.py::test_a_stop_string_across_tokens_ends_the_text_before_it",
        ),
    ),
    Fault(
        "usage does not count the first token",
        _REQUEST_LOG,
        "        if self.first_token is None:\n            self.first_token = time.monotonic()\n",
        "        if self.first_token is None:\n            self.first_token = time.monotonic()\n            return\n",
        (f"{_API}/test_completions.py::test_an_answer_has_text_usage_and_a_finish_reason",),
    ),
    Fault(
        "usage adds up to the wrong total",
        _USAGE,
        "        prompt + output,\n",
        "        prompt,\n",
        (f"{_API}/test_completions.py::test_an_answer_has_text_usage_and_a_finish_reason",),
    ),
    Fault(
        "a stream ends without [DONE]",
        _SSE,
        "    end=DONE,\n",
        '    end=b"",\n',
        (f"{_API}/test_stream.py::test_events_have_openais_exact_form",),
    ),
    Fault(
        "the temperature is ignored",
        _SAMPLER,
        "temperature = torch.where(how.temperature == 0, 1.0, how.temperature)",
        "temperature = torch.ones_like(how.temperature)",
        (f"{_ENGINE}/test_sampler.py::test_frequencies_are_those_of_the_filtered_distribution",),
    ),
    Fault(
        "the seed is ignored",
        _SAMPLER,
        "key=seed & (2**64 - 1)",
        "key=0",
        (f"{_ENGINE}/test_sampler.py::test_the_seed_and_the_position_decide",),
    ),
    Fault(
        "a grammar is not applied",
        _PROCESSORS,
        '.masked_fill(~allowed, float("-inf"))',
        ".clone()",
        (f"{_ENGINE}/test_sampler.py::test_only_what_a_grammar_allows_is_drawn",),
    ),
    Fault(
        "long prompts go first",
        _PRIORITY,
        "    return arrived + head_start(priority) + PATIENCE * remaining",
        "    return arrived + head_start(priority) - PATIENCE * remaining",
        (f"{_ENGINE}/test_scheduler.py::test_decodes_are_never_left_out_and_the_shortest_prompt_goes_first",),
    ),
    Fault(
        "a priority is ignored",
        _PRIORITY,
        "    return MOST_HEAD_START * priority / (abs(priority) + _HALF_PRIORITY)",
        "    return 0.0",
        (f"{_ENGINE}/test_scheduler.py::test_a_priority_is_worth_a_head_start_and_no_more",),
    ),
    Fault(
        "preemption loses the tokens that were drawn",
        _RUN_QUEUE,
        "        victim.preempted = True\n",
        "        victim.preempted = True\n        del victim.tokens[victim.prompt_tokens :]\n",
        (f"{_ENGINE}/test_engine.py::test_a_preempted_request_goes_on_with_the_same_answer",),
    ),
    Fault(
        "an answer that finds no page goes on without one",
        _SCHEDULER,
        "                if not self._queue.make_place(request, now):\n                    continue\n",
        "                pass\n",
        (f"{_ENGINE}/test_scheduler.py::test_answers_that_outgrow_their_promise_preempt_the_last_comer_once",),
    ),
    Fault(
        "the bound on waiting prompts is ignored",
        _ADMISSION,
        "if (few and short) or self._in_reserve",
        "if few or self._in_reserve",
        (f"{_ENGINE}/test_admission.py::test_prompt_tokens_are_bounded_but_an_empty_queue_takes_any_prompt",),
    ),
    Fault(
        "pages that may hold NaN are not cleaned",
        _PAGE_POOL,
        "            self._unclean += sorted(unclean)\n",
        "",
        (f"{_ENGINE}/test_faults.py::test_a_row_that_is_no_number_fails_alone_and_leaves_no_trace_in_its_pages",),
    ),
    Fault(
        "a call that was cut is told as finished",
        _RESPONSE_BUILDER,
        'yield from self._close(status if self._is_text else "incomplete")',
        'yield from self._close(status if self._is_text else "completed")',
        (f"{_API}/test_responses_tools.py::test_a_call_that_was_cut_is_never_a_finished_one",),
    ),
    Fault(
        "a response of another key can be read",
        _RESPONSE_STORE,
        '"SELECT number, body FROM responses WHERE id = ? AND owner = ?", (response_id, owner)',
        "\"SELECT number, body FROM responses WHERE id = ? AND owner >= ''\", (response_id,)",
        (f"{_API}/test_response_store.py::test_a_response_comes_back_with_its_items",),
    ),
    Fault(
        "Anthropic's usage tells no reads of the cache",
        _MESSAGE_BUILDER,
        "cache_read_input_tokens=record.cached_tokens,",
        "cache_read_input_tokens=0,",
        (f"{_API}/test_messages_answers.py::test_a_message_has_text_and_its_cost",),
    ),
    Fault(
        "a long answer is encoded on the event loop",
        _RESPOND,
        "    if not is_long(value):\n",
        "    if True:\n",
        (f"{_API}/test_long_answers.py::test_no_turn_has_much_to_do",),
    ),
    Fault(
        "a slow reader may leave as much unread as it likes",
        _UNREAD,
        "if self._bytes + size > MOST_OF_ONE or (",
        "if (",
        (f"{_ENGINE}/test_unread.py::test_one_reader_is_bounded_and_all_are",),
    ),
    Fault(
        "updates that are joined lose log-probabilities of the prompt",
        _UNREAD,
        '("tokens", "logprobs", "prompt_logprobs", "attended")',
        '("tokens", "logprobs", "attended")',
        (f"{_ENGINE}/test_unread.py::test_what_is_told_once_survives_joining",),
    ),
    Fault(
        "what the server writes of a grammar is counted as the caller's",
        _GRAMMAR_COMPILER,
        "question if given is None else _encoded(given)",
        "question",
        (f"{_API}/test_strict_tools.py::test_as_many_tools_as_there_may_be",),
    ),
    Fault(
        "a 405 names the methods of one route",
        _ERROR_ANSWERS,
        "found = [method for method in _METHODS if is_there(method)]",
        "found = [method for method in _METHODS if is_there(method)][:1]",
        (f"{_API}/test_endpoint_attacks.py::test_somebody_else_is_served_and_nothing_stays",),
    ),
    Fault(
        "an effort that nobody reads is dropped in silence",
        _TEMPLATE_VARIABLES,
        "or (name == _EFFORT and value == _USUAL_EFFORT)",
        "or name == _EFFORT",
        (f"{_API}/test_template_fields.py::test_what_each_effort_means",),
    ),
)


def occurrences(fault: Fault) -> int:
    """How often the text that a fault replaces is in its file; 0 where there is no such file."""
    path = ROOT / fault.file
    return path.read_text().count(fault.old) if path.is_file() else 0


def caught_by(fault: Fault) -> str | None:
    """The test that fails first where the fault is planted; None where none does.

    Raises:
        RuntimeError: the tests did not run; the message is what pytest said.
    """
    with tempfile.TemporaryDirectory(prefix="longreach-fault-") as folder:
        copy = Path(folder)
        for name in _COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            else:
                shutil.copy(ROOT / name, copy / name)
        path = copy / fault.file
        path.write_text(path.read_text().replace(fault.old, fault.new))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(copy / package) for package in _PACKAGES),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "120"]
        done = subprocess.run([*command, *fault.tests], cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None:
        raise RuntimeError(f"{fault.name}: pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr}")
    return failed[1]


def main(names: list[str], processes: int) -> int:
    """Plant the faults with these names, or all; print a table; the exit status."""
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in names if name not in known]:
        print(f"no such fault: {', '.join(unknown)}; there are:\n  " + "\n  ".join(known), file=sys.stderr)
        return 2
    chosen = [known[name] for name in names] or list(FAULTS)
    if lost := [fault for fault in chosen if occurrences(fault) != 1]:
        for fault in lost:
            print(f"{fault.file} has {occurrences(fault)} times, not once: {fault.old!r}", file=sys.stderr)
        return 1
    escaped = 0
    with ThreadPoolExecutor(processes) as threads:
        for fault, caught in zip(chosen, threads.map(caught_by, chosen), strict=True):
            escaped += caught is None
            print(f"| {fault.name} | {caught or 'ESCAPED'} |", flush=True)
    print(f"{len(chosen) - escaped} of {len(chosen)} caught")
    return 1 if escaped else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="which faults; all of them if none is named")
    parser.add_argument("-n", type=int, default=2, help="how many are planted at a time")
    asked = parser.parse_args()
    sys.exit(main(asked.names, asked.n))
