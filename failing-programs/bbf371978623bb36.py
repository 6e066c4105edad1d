# python SCRIPT runs it alone, then on 2 processes; it goes on on 3 if it is cut.
import sys

sys.path[:0] = ['/work/wt/trainerfix/tests/scenarios', '/work/wt/trainerfix/tests']
from programs import Program, prove, warm_server
from ways import Way

with warm_server():
    print(*prove([Program(host='trainer', seed=106, parts=('logs_a_masked_mean=training',), cut=None)], Way(size=2, layout=(), gloo=False, options=(), by_callback=False, resumed_on=3, resume=(), after_failure=False, tier='', part=(0, 1))).values())

# @trainer_part(each=STAGES)
# def logs_a_masked_mean(p: TrainerBuild, stage: str) -> None:
#     def note(module: Module, batch: Any) -> None:
#         mask = (batch[1] != 0).double()
#         value, count = (batch[0][:, 1] * mask).sum(), int(mask.sum())
#         module.log("masked", value / max(1, count), batch_size=count, on_step=False, on_epoch=True)
# 
#     in_steps(p, stage, note)
