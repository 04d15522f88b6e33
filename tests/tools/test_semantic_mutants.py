"""Break one equation, rule of the protocol or defense at a time and see the test that guards it fail.

A row of `MUTANTS` names a source file, a text that occurs in it once, its replacement, and a test that must then fail.
The text must lie inside one function. That function gets the changed code in place, in a process of its own, so that
whoever imported it runs the change. When a function moves, is renamed or is rewritten, update its row; when a rule is
dropped, drop the row.
"""

import ast
import importlib
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

import efcil

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(efcil.__file__).parent

# what is broken | file in src/efcil | find | replace | test in tests/ that must fail
MUTANTS = [
    # the drift of the features and the row space of a class, Eq. 3-10
    ("Eq. 5 without its ridge", "core/projection.py",
     "ridged.diagonal().add_(ridge)", "ridged.diagonal().add_(0.0)",
     "core/test_projection.py::test_task_shift_equals_the_literal_equation"),
    ("normal equations in float32", "core/projection.py",
     "gram.addmm_(x.T, x)", "gram += (x.T.float() @ x.float()).to(DTYPE)",
     "core/test_projection.py::test_task_shift_of_float32_features_is_solved_in_float64"),
    ("projector on the input side", "core/projection.py",
     "space.project_rows(task_shift.to(DTYPE))", "space.projector() @ task_shift.to(DTYPE)",
     "core/test_projection.py::test_class_shift_equals_the_literal_equation"),
    ("numerical rank without a tolerance", "core/projection.py",
     'share = values.shape[-1] * EPS if rule == "numerical" else tolerance',
     'share = 0.0 if rule == "numerical" else tolerance',
     "core/test_projection.py::test_projector_equals_the_literal_one_and_is_a_projector"),
    ("shift from the new features to the old", "shift/dual_projection.py",
     "pairs = features.old_new_pairs(o.shift_view)",
     "pairs = features.old_new_pairs(o.shift_view)[::-1]",
     "test_methods.py::test_dpcr_is_algorithm_1"),
    ("kernel of SDC too wide", "shift/sdc.py",
     "div_(-2 * sigma**2)", "div_(-4 * sigma**2)",
     "shift/test_sdc_ldc_adc.py::test_sdc_is_its_equation"),
    ("ADC keeps images that no attack moved to the class", "shift/adc.py",
     "== classes[:, None]", ">= 0",
     "shift/test_sdc_ldc_adc.py::test_adc_is_its_equation"),
    # statistics of a class, Eq. 15-17
    ("centered Gram matrix", "core/class_stats.py",
     "parts.append(compress(x, storage))", "parts.append(compress(x - x.mean(0), storage))",
     "core/test_class_stats.py::test_statistics_equal_the_literal_prototypes"),
    ("means merged without their counts", "core/class_stats.py",
     "total[at] += part.mean * part.count[:, None]", "total[at] += part.mean",
     "core/test_class_stats.py::test_a_class_in_both_parts_is_that_of_all_its_images"),
    ("P G P' for P' G P", "core/class_stats.py",
     "old.transform(shift if shift.ndim == 2 else shift[block])",
     "old.transform((shift if shift.ndim == 2 else shift[block]).mT)",
     "core/test_class_stats.py::test_moved_statistics_are_the_statistics_of_moved_features"),
    ("mean not moved", "core/class_stats.py",
     "mean = self.mean @ shift if shift.ndim == 2 else", "mean = self.mean if shift.ndim == 2 else",
     "core/test_class_stats.py::test_moved_statistics_are_the_statistics_of_moved_features"),
    ("mean not projected onto the row space", "core/gram_storage.py",
     "mean = space.project_rows(mean[:, None, :])[:, 0]", "pass",
     "core/test_class_stats.py::test_task_by_task_equals_the_ladder"),
    ("old statistics merged without being shifted", "trajectory.py",
     "old = track.shift(old, task)", "pass",
     "test_methods.py::test_dpcr_is_algorithm_1"),
    ("statistics shifted twice", "trajectory.py",
     "shifted[key] = old\n", "shifted[key] = old = track.shift(old, task) if old and track.shift else old\n",
     "test_methods.py::test_lwf_ncm_keeps_means_and_dp_ncm_moves_them"),
    ("one track for all options of a shift", "trajectory.py",
     "None if shift is None else shift.key", "None if shift is None else type(shift)",
     "test_methods.py::test_other_options_of_a_shift_are_another_track"),
    ("Grams left behind by a shift of means", "methods.py",
     'needs_grams and shift is not None and shift.moves == "mean"', "False",
     "test_methods.py::test_impossible_combinations_are_refused_with_their_parts_and_the_remedy"),
    # classifiers, Eq. 11-14 and 18-22
    ("ridge regression without gamma", "core/ridge.py",
     "total.diagonal().add_(ridge)", "total.diagonal().add_(0.0)",
     "core/test_ridge.py::test_ridge_weight_takes_any_statistics_and_equals_the_literal_equations"),
    ("X'Y without the counts", "core/ridge.py",
     "cross = stats.mean.to(DTYPE).T * stats.count", "cross = stats.mean.to(DTYPE).T",
     "core/test_ridge.py::test_ridge_weight_takes_any_statistics_and_equals_the_literal_equations"),
    ("columns normalized by the l1 norm", "core/ridge.py",
     "torch.linalg.vector_norm(scaled, dim=0, keepdim=True)",
     "torch.linalg.vector_norm(scaled, 1, dim=0, keepdim=True)",
     "core/test_ridge.py::test_normalize_columns"),
    ("columns of the classifier not normalized", "classifiers/ridge.py",
     "normalize_columns(weight) if self.options.normalize else weight", "weight",
     "test_methods.py::test_dpcr_is_algorithm_1"),
    ("class means not normalized", "core/nearest_mean.py",
     "normalize(means.to(wide), dim=1).T", "means.to(wide).T",
     "test_methods.py::test_lwf_ncm_keeps_means_and_dp_ncm_moves_them"),
    ("log-determinant left out", "core/gaussian.py",
     "mahalanobis_scores(points, means, factors) / 2 - volumes", "mahalanobis_scores(points, means, factors) / 2",
     "learners/test_pseudo_replay.py::test_two_heads_are_added_as_their_equation_says"),
    ("FeCAM's means without Tukey's power", "classifiers/mahalanobis.py",
     "direction(stats.mean, o.power)", "direction(stats.mean, 1.0)",
     "classifiers/test_frozen_backbone.py::test_fecam_is_its_formulas"),
    ("cross-validated residual with r / (l + r) unsquared", "core/gcv.py",
     "cut.square() @ explained", "cut @ explained",
     "estimators/test_estimators.py::test_gcv_from_sums_equals_the_literal_formula"),
    # training, Eq. 1-2
    ("distillation times T^2", "losses.py",
     "log_softmax(logits.float() / temperature, 1)).sum(1).mean()",
     "log_softmax(logits.float() / temperature, 1)).sum(1).mean() * temperature**2",
     "training/test_trainer.py::test_distillation_has_no_temperature_squared"),
    ("student not softened", "losses.py",
     "log_softmax(logits.float() / temperature, 1)", "log_softmax(logits.float(), 1)",
     "training/test_trainer.py::test_lwf_loss_is_equations_1_and_2"),
    ("old logits in the cross-entropy", "losses.py",
     "cross_entropy(logits[:, old:].float(), labels - old)", "cross_entropy(logits.float(), labels)",
     "training/test_trainer.py::test_only_new_logits_enter_the_cross_entropy"),
    ("teacher in training mode", "learners/networks.py",
     "self.teacher.eval()", "self.teacher.train(mode)",
     "training/test_trainer.py::test_the_teacher_does_not_learn"),
    ("pseudo-samples from the last method's track", "trajectory.py",
     "for part in self.parts.values():\n            for key in part.tracks:",
     "for part in reversed(self.parts.values()):\n            for key in part.tracks:",
     "learners/test_pseudo_replay.py::test_the_first_methods_track_decides_where_several_are_compared"),
    ("pseudo-samples spread around the origin", "core/gaussian.py",
     "stats.scatter() / stats.count.sum()", "stats.gram_sum() / stats.count.sum()",
     "learners/test_pseudo_replay.py::test_pseudo_samples_are_drawn_from_the_means_and_the_pooled_covariance"),
    ("PODNet's true class in the denominator", "learners/podnet.py",
     "s.scatter(1, true, 0.0).logsumexp(1)", "s.logsumexp(1)",
     "learners/test_podnet.py::test_nca_and_its_gradient_are_the_published_codes"),
    ("SGD forgets its momentum", "accel/optim.py",
     '[self.state[p]["momentum_buffer"] if self.momentum else None for p in with_gradient]',
     "[None for p in with_gradient]",
     "accel/test_optim.py::test_it_is_torch_s_sgd_to_the_bit"),
    ("learning rate dropped an epoch late", "training/schedule.py",
     "sum(epoch >= m for m in self.milestones)", "sum(epoch > m for m in self.milestones)",
     "training/test_trainer.py::test_learning_rate_follows_the_schedule"),
    ("herding forgets what it chose", "learners/exemplars.py",
     "sum_ = sum_ + x[row]", "sum_ = sum_ + mean",
     "learners/test_icarl.py::test_herding_is_algorithm_4"),
    # protocol and metrics
    ("labels mapped by the order for its inverse", "tasks.py",
     "return np.argsort(self.order)[labels]", "return self.order[labels]",
     "test_tasks.py::test_stream_remaps_labels_and_keeps_uneven_counts"),
    ("class order of another generator", "tasks.py",
     "np.random.RandomState(int(text)).permutation(classes)", "np.random.default_rng(int(text)).permutation(classes)",
     "test_tasks.py::test_order_is_numpys_seeded_permutation"),
    ("images of old tasks stay available", "protocol.py",
     "        task.close()\n", "",
     "test_methods.py::test_old_images_are_out_of_reach"),
    ("A_t as the mean of tasks", "core/metrics.py",
     "return [self._over(row, 0, len(row)) for row in self._correct]\n",
     "return [_mean([self._over(row, i, i + 1) for i in range(len(row))]) for row in self._correct]\n",
     "core/test_metrics.py::test_three_uneven_tasks_by_hand"),
    ("forgetting from the first accuracy of a task", "core/metrics.py",
     "max(self._r(s, i) for s in range(i, t))", "max(self._r(s, i) for s in range(i, i + 1))",
     "core/test_metrics.py::test_forgetting_and_bwt_part_where_a_task_first_improves"),
    # defenses of the threat model: of what comes over the network
    ("JSON of any number of elements", "serve/forms.py",
     "        _check_structure(body)\n        try:", "        try:",
     "serve/test_attacks.py::test_json_that_is_much_larger_when_it_is_understood"),
    ("JSON of any length", "serve/forms.py",
     "if most is not None and length > most:", "if False:",
     "serve/test_attacks.py::test_one_json_body_is_refused_by_its_length_alone"),
    ("forms in any character set", "serve/multipart.py",
     'if charset not in ("utf-8", "utf8"):', "if False:",
     "serve/test_attacks.py::test_forms_are_utf_8"),
    ("fields of any length", "serve/multipart.py",
     "if end - split > MAX_FIELD:", "if False:",
     "serve/test_attacks.py::test_names_and_fields_have_a_length"),
    ("a refused body read to its end", "serve/guard.py",
     "if unread or max(self._declared, self.count) > self._limit:", "if unread:",
     "serve/test_serve.py::test_a_refused_body_is_read_no_further_than_the_limit"),
    ("bodies without a limit together", "serve/guard.py",
     "largest.evict()", "pass",
     "serve/test_attacks.py::test_bodies_under_way_have_a_limit_together"),
    ("decoders that nobody watches", "serve/decoding.py",
     "elif not has_process_limits() and self.resident_memory > self._most:", "elif False:",
     "serve/test_decoding.py::test_where_the_system_has_no_limits_somebody_watches"),
    ("heads of requests without a time limit", "serve/connections.py",
     "self._header_timer = self.loop.call_later(HEADER_TIMEOUT, self.drop)", "pass",
     "serve/test_connections.py::test_idle_and_slow_clients_are_ended"),
    ("connections without number", "serve/connections.py",
     'len(self._open) < self.limit or self._drop(list(self._open), f"all {self.limit:,} are taken")', "True",
     "serve/test_connections.py::test_who_keeps_the_service_waiting_makes_room"),
    ("a log line for each connection too many", "serve/connections.py",
     "if time.monotonic() - self._said >= SAID_AGAIN:", "if True:",
     "serve/test_connections.py::test_no_descriptor_at_all_is_said_once"),
    ("any name in the Host header", "serve/hosts.py",
     'return name in names or _is_address(name.strip("[]"))', "return True",
     "serve/test_connections.py::test_other_names_do_not_reach_the_service"),
    ("places of the machine in answers", "serve/images.py",
     'text = _PATH.sub("(a file)", text)', "pass",
     "serve/test_places.py::test_answers_say_nothing_of_the_machine"),
    ("damaged archives as errors of the service", "serve/archive.py",
     'raise DataError(f"cannot be decompressed: {error}") from None', "raise",
     "serve/test_places.py::test_damaged_zips_are_no_server_error"),
    # of files: what is written to, removed and read
    ("links and devices written to", "files.py",
     "if found is not None and not stat.S_ISREG(found.st_mode):\n        raise FileRefusedError(\n"
     '            f"{folder.path / name} is {_kind(found)}, which is not written to',
     "if False:\n        raise FileRefusedError(\n"
     '            f"{folder.path / name} is {_kind(found)}, which is not written to',
     "test_files.py::test_only_regular_files_are_replaced"),
    ("links followed below a directory of ours", "files.py",
     "if found is not None and not stat.S_ISDIR(found.st_mode):\n                raise",
     "if False:\n                raise",
     "test_files.py::test_links_below_a_directory_of_ours_are_not_followed"),
    ("a foreign directory emptied for temporary files", "files.py",
     "if own and not _has_marker(folder, kind):", "if False:",
     "test_files.py::test_a_working_directory_that_is_not_ours_is_refused"),
    ("results over files of others", "files.py",
     "if not _has_marker(folder, _RESULTS):", "if False:",
     "report/test_hostile_summaries.py::test_files_of_others_are_not_replaced_by_results"),
    ("a model saved over a thesis", "product/model_directory.py",
     "        if not known:\n", "        if False:\n",
     "product/test_model_directory.py::test_what_is_not_the_models_is_never_replaced"),
    ("files of a model that its readers cannot read", "product/model_directory.py",
     "folder.set_mode(mode, name)", "pass",
     "product/test_model_directory.py::test_whoever_may_enter_a_model_may_read_all_of_it"),
    ("checkpoints of any run", "experiment/checkpoints.py",
     'if run is not None and meta.get("run") != run:', "if False:",
     "experiment/test_run_directory.py::test_a_checkpoint_is_bound_to_its_run_and_its_position"),
    ("checkpoints under any name", "experiment/checkpoints.py",
     "if (saved := meta.pop(_PLACE, None)) != place:", "if (saved := meta.pop(_PLACE, None)) is None:",
     "experiment/test_run_directory.py::test_a_checkpoint_is_bound_to_its_run_and_its_position"),
    ("a model that is replaced while it is opened given up", "product/model_directory.py",
     "if time.monotonic() < deadline and (_was_replaced(held) or _current(real) != place):", "if False:",
     "product/test_model_directory.py::test_a_load_while_models_are_saved_gives_one_of_them_whole"),
    ("weights that are not finite", "product/model_directory.py",
     "check_finite(tensors[name])", "pass",
     "product/test_model_directory.py::test_numbers_that_are_not_finite_are_refused"),
    ("cards that ask for anything", "product/model_directory.py",
     "check_config(config, tensors[WEIGHTS], tensors[STATISTICS])", "pass",
     "product/test_card_checks.py::test_what_a_card_asks_for_is_checked_before_memory_is_taken"),
    ("backbones from anywhere", "product/card_checks.py",
     "    _check_source(name)\n", "",
     "product/test_card_checks.py::test_a_backbone_from_elsewhere_needs_the_users_agreement"),
    ("undo to whatever is there", "product/classifier.py",
     "self._snapshot = self._checked(before)", "self._snapshot = self._for_serving(before)",
     "product/test_card_checks.py::test_undo_to_a_damaged_state_leaves_the_good_model"),
    ("JSON of any number of values", "files.py",
     "if count > JSON_VALUES:", "if False:",
     "test_files.py::test_json_of_more_values_than_there_is_room_for"),
    ("summaries of any length", "report/load.py",
     "        if length > most:\n", "        if False:\n",
     "report/test_hostile_summaries.py::test_summaries_that_stand_for_more_than_a_page"),
    ("names that a terminal obeys", "errors.py",
     "if text.isprintable():", "if True:",
     "report/test_hostile_summaries.py::test_names_that_a_terminal_would_obey_are_escaped"),
    # of sizes and values
    ("Gram matrices beyond the memory", "product/classifier.py",
     'if form == "gram" and room is not None and size > room / 2:', "if False:",
     "product/test_classifier.py::test_grams_that_do_not_fit_are_refused_before_memory_is_taken"),
    ("every image scored against every class", "product/evidence.py",
     "if len(rows) > most:", "if False:",
     "product/test_pretrained.py::test_of_many_images_with_many_classes_as_many_are_scored_as_are_bounded"),
    ("a budget without end", "product/classifier.py",
     'if budget is not None and not 0 < budget < float("inf"):', "if False:",
     "cli/test_hostile_options.py::test_a_new_model_of_impossible_values"),
    ("probabilities of scores that are not bounded", "product/classifier.py",
     "scores -= scores.amax(1, keepdim=True)", "pass",
     "product/test_classifier.py::test_probabilities_sum_to_one_whatever_the_features"),
]  # fmt: skip


def enclosing(tree: ast.Module, line: int) -> list[str]:
    """Name of the outermost function around a line, after the classes that it is in."""
    names, body = [], tree.body
    while True:
        around = [n for n in body if hasattr(n, "name") and n.lineno <= line <= n.end_lineno]
        assert around, f"line {line} is in no function"
        names.append(around[0].name)
        if not isinstance(around[0], ast.ClassDef):
            return names
        body = around[0].body


def broken(file: str, find: str, replace: str) -> tuple[types.FunctionType, types.CodeType]:
    """Return the function around `find`, and the code that it has with `replace` instead."""
    text = (SOURCE / file).read_text(encoding="utf-8")
    assert text.count(find) == 1, f"{file} has {find!r} {text.count(find)} times, wanted once: update its row"
    code = compile(text.replace(find, replace), file, "exec")
    found = importlib.import_module(".".join(("efcil", *Path(file).with_suffix("").parts)))
    for name in enclosing(ast.parse(text), text[: text.index(find)].count("\n") + 1):
        found = vars(found)[name]
        (code,) = [c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name]
    return inspect.unwrap(found.fget if isinstance(found, property) else found), code


def fails(item: pytest.Item) -> bool:
    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


class Breaker:
    """A plugin of pytest that runs the test of each row as the code is, then with the row's function broken."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for what, *mutant, test in MUTANTS:
            items = [item for item in session.items if item.nodeid.split("[")[0] == f"tests/{test}"]
            try:
                function, code = broken(*mutant)
            except AssertionError as error:
                self.found[what] = str(error)
                continue
            sound = function.__code__
            if any(fails(item) for item in items):
                self.found[what] = f"{test} fails although nothing is broken"
                continue
            function.__code__ = code
            self.found[what] = "killed" if any(fails(item) for item in items) else f"{test} does not notice"
            function.__code__ = sound
        return True


def main(path: str) -> None:
    """Write what became of each row to a file of JSON."""
    breaker = Breaker()
    tests = sorted({f"tests/{row[-1]}" for row in MUTANTS})
    code = pytest.main(["-q", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[breaker])
    Path(path).write_text(json.dumps(breaker.found), encoding="utf-8")
    sys.exit(code)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("mutants") / "found.json"
    done = subprocess.run([sys.executable, __file__, str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("what", [row[0] for row in MUTANTS])
def test_a_test_fails_when_this_is_broken(found, what):
    assert found[what] == "killed"


@pytest.mark.parametrize("row", MUTANTS, ids=lambda row: row[0])
def test_rows_fit_the_source(row):
    function, code = broken(*row[1:4])
    assert function.__code__ != code


@pytest.mark.parametrize("find", ["nowhere in this file", "def "], ids=["never", "often"])
def test_a_text_that_does_not_occur_once_is_refused(find):
    with pytest.raises(AssertionError, match="wanted once"):
        broken("core/class_stats.py", find, "pass")


if __name__ == "__main__":
    main(sys.argv[1])
