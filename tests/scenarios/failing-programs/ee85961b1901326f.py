# python SCRIPT runs it alone, then on 2 processes; it goes on on 3 if it is cut.
import sys

sys.path[:0] = ['/work/main/tests/scenarios', '/work/main/tests']
from programs import Program, prove, warm_server
from ways import Way

with warm_server():
    print(*prove([Program(host='trial', seed=210069, parts=('augments=own generators',), cut=None)], Way(size=2, layout=(), gloo=False, options=(), by_callback=False, resumed_on=3, resume=(), after_failure=False, tier='', part=(0, 1))).values())

# @part(each=AUGMENTATIONS, without=f"{STREAMS} {NO_FIT}", samples_draw=True)
# def augments(p: Build, kind: str) -> None:
#     plain = p.data
# 
#     def data(*args: Any) -> Augmented:
#         made = Augmented(*plain(*args).tensors)
#         made.function = AUGMENTATIONS[kind]
#         return made
# 
#     p.data = data
#     p.train, p.validation = DataLoader(data(29), 8, shuffle=True), DataLoader(data(13, 9), 5)
