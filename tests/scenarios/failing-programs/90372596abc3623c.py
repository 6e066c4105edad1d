# python SCRIPT runs it alone, then on 2 processes; it goes on on 3 if it is cut.
import sys

sys.path[:0] = ['/work/main/tests/scenarios', '/work/main/tests']
from programs import Program, prove, warm_server
from ways import Way

with warm_server():
    print(*prove([Program(host='trainer', seed=240364, parts=('workers=1', 'ends_epochs_early', 'metric=own_cat'), cut=None)], Way(size=2, layout=(), gloo=False, options=(), by_callback=False, resumed_on=3, resume=(), after_failure=False, tier='', part=(0, 1))).values())

# @part(kind="train", each=("1", "2"))
# def workers(p: Build, count: str) -> None:
#     persists = p.maybe()
#     p.train = DataLoader(
#         p.data(p.rng.randint(12, 26)), p.rng.randint(3, 7), True, num_workers=int(count), persistent_workers=persists
#     )
# @trainer_part()
# def ends_epochs_early(p: TrainerBuild) -> None:
#     p.extend(on_train_batch_start=lambda module, batch, batch_idx: -1 if batch_idx == 2 else None)
# @trainer_part(each=(*BY_LOGITS, *BY_VALUES))
# def metric(p: TrainerBuild, name: str) -> None:
#     """Its value is logged at the end of the epoch."""
#     p.allowed.append("in a way .dist_reduce_fx. that cannot be put together")  # on fewer processes, after a cut
#     stage = p.rng.choice(STAGES)
# 
#     def note(module: Module, batch: Any) -> None:
#         module.measure.update(*_arguments(name, module(batch[0]).detach(), batch[1]))
# 
#     def finish(module: Module) -> None:
#         found = module.measure.compute()
#         found = found if isinstance(found, dict) else {"measured": found}
#         module.log_dict({key: value.double().square().sum() for key, value in found.items()})
#         module.measure.reset()
# 
#     in_steps(p, stage, note)
#     hook = {"training": "on_train_epoch_end", "validation": "on_validation_epoch_end"}[stage]
#     p.extend(lambda module: setattr(module, "measure", _make_metric(name)), None, **{hook: finish})
