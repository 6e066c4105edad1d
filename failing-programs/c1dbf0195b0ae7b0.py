# python SCRIPT runs it alone, then on 2 processes; it goes on on 3 if it is cut.
import sys

sys.path[:0] = ['/work/wt/trainerfix/tests/scenarios', '/work/wt/trainerfix/tests']
from programs import Program, prove, warm_server
from ways import Way

with warm_server():
    print(*prove([Program(host='trainer', seed=202, parts=('draws_in=on_validation_epoch_end',), cut=None)], Way(size=2, layout=(), gloo=False, options=(), by_callback=False, resumed_on=3, resume=(), after_failure=False, tier='', part=(0, 1))).values())

# @trainer_part(each=("on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end"))
# def draws_in(p: TrainerBuild, hook: str) -> None:
#     @torch.no_grad()
#     def draw(self: Any, trainer: Any, module: Any, *_: Any) -> None:
#         for parameter in module.layers.parameters():
#             parameter.add_(0.02 * torch.randn_like(parameter) + 0.01 * random.random())
# 
#     p.callbacks.append(type("Draws", (pl.Callback,), {hook: draw})())
