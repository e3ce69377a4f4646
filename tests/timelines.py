"""A compiler's dump and a timeline, made by hand and small enough to be counted."""

from pathlib import Path

from jaxmem.reading.provenance import Category
from jaxmem.reading.timeline import Loop, Pass, Span, Timeline

MiB = 2**20

PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "model.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%cond (state: (s32[], f32[4,100])) -> pred[] {
  %state = (s32[], f32[4,100]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %four = s32[] constant(4)
  ROOT %lt = pred[] compare(%count, %four), direction=LT
}

%body (carry: (s32[], f32[4,100])) -> (s32[], f32[4,100]) {
  %carry = (s32[], f32[4,100]{1,0}) parameter(0)
  %turn = s32[] get-tuple-element(%carry), index=0
  %one = s32[] constant(1)
  %up = s32[] add(%turn, %one)
  %stack = f32[4,100]{1,0} get-tuple-element(%carry), index=1
  %tanh = f32[1,100]{1,0} tanh(%stack), metadata={op_name="jit(step)/jvp()/while/body/tanh" stack_frame_id=1}
  %update = f32[4,100]{1,0} dynamic-update-slice(%stack, %tanh), metadata={op_name="jit(step)/jvp()/while/body/write"}
  ROOT %next = (s32[], f32[4,100]{1,0}) tuple(%up, %update)
}

ENTRY %main (w: f32[100], x: f32[50]) -> f32[100] {
  %w = f32[100]{0} parameter(0), metadata={op_name="w"}
  %x = f32[50]{0} parameter(1), metadata={op_name="x"}
  %zeros = f32[4,100]{1,0} broadcast(%w), metadata={op_name="jit(step)"}
  %start = s32[] constant(0)
  %tuple = (s32[], f32[4,100]{1,0}) tuple(%start, %zeros)
  %while = (s32[], f32[4,100]{1,0}) while(%tuple), condition=%cond, body=%body, metadata={op_name="jit(f)/jvp()/while"}
  %again = f32[100]{0} cosine(%while), metadata={op_name="jit(step)/transpose(jvp())/rematted_computation/cos"}
  %grad = f32[100]{0} multiply(%again, %while), metadata={op_name="jit(step)/transpose(jvp())/mul"}
  %step = f32[100]{0} multiply(%grad, %w), metadata={op_name="jit(step)/mul"}
  ROOT %new = f32[100]{0} subtract(%w, %step), metadata={op_name="jit(step)/sub"}
}
"""
# fmt: off
_SCHEDULE = [
    "w", "x", "zeros", "tuple", "state", "lt", "carry", "tanh", "update", "next",
    "while", "again", "grad", "step", "new",
]
_SPANS = {
    "w{}": (0, 15), "x{}": (0, 15), "zeros{}": (2, 4), "state{1}": (4, 6), "carry{1}": (6, 8), "tanh{}": (7, 8),
    "update{}": (8, 10), "while{1}": (10, 12), "again{}": (11, 12), "grad{}": (12, 13), "step{}": (13, 14),
    "new{}": (14, 15),
}
# fmt: on
LIVE = "\n".join(
    ["HloLiveRange (max 15):", "  InstructionSequence:"]
    + [f"    {i}:{name}" for i, name in enumerate(_SCHEDULE)]
    + ["  BufferLiveRange:"]
    + [f"    {name}:{first}-{last}" for name, (first, last) in _SPANS.items()]
    + ["  Live ranges at 12 (peak):", "    while{1}: 1600 bytes (cumulative: 1600 bytes)", ""]
)
PLACES = """BufferAssignment:
allocation 0: size 400, parameter 0, shape |f32[100]| at ShapeIndex {}, maybe-live-out:
 value: <1 w @0> (size=400,offset=0): f32[100]{0}
 value: <2 new @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 200, parameter 1, shape |f32[50]| at ShapeIndex {}:
 value: <3 x @0> (size=200,offset=0): f32[50]{0}
allocation 2: size 2500, preallocated-temp:
 value: <4 zeros @0> (size=1600,offset=0): f32[4,100]{1,0}
 value: <5 state{1} (phi) @0> (size=1600,offset=0): f32[4,100]{1,0}
 value: <6 carry{1} (phi) @0> (size=1600,offset=0): f32[4,100]{1,0}
 value: <7 update @0> (size=1600,offset=0): f32[4,100]{1,0}
 value: <8 while{1} (phi) @0> (size=1600,offset=0): f32[4,100]{1,0}
 value: <9 tanh @0> (size=400,offset=1600): f32[1,100]{1,0}
 value: <10 again @0> (size=400,offset=1600): f32[100]{0}
 value: <11 grad @0> (size=400,offset=2000): f32[100]{0}
 value: <12 step @0> (size=400,offset=0): f32[100]{0}
"""
_NAMES = {
    1: ("w", "zeros, operand 0", "step, operand 1"), 2: ("new",), 3: ("x",), 4: ("zeros", "while, operand 0 {1}"),
    5: ("state {1}",), 6: ("carry {1}", "tanh, operand 0", "update, operand 0"), 7: ("update",),
    8: ("while {1}", "again, operand 0", "grad, operand 1"), 9: ("tanh", "update, operand 1"),
    10: ("again", "grad, operand 0"), 11: ("grad", "step, operand 0"), 12: ("step", "new, operand 1"),
}  # fmt: skip


def _entry(number: int, position: str, *users: str) -> str:
    maker = next(line for line in PROGRAM.splitlines() if f"%{position.partition(' ')[0]} = " in line)
    uses = "".join(f"  {user}\n" for user in users) or "  (none)\n"
    return f"<{number} {position} @0>\n positions:\n  {position}\n uses:\n{uses} from instruction: {maker.strip()}\n"


VALUES = "BufferAssignment:\n\nUsed values:\n" + "".join(_entry(number, *names) for number, names in _NAMES.items())

FILES = {
    "after_optimizations.txt": PROGRAM,
    "after_optimizations-live-range.txt": LIVE,
    "after_optimizations-buffer-assignment.txt": PLACES,
    "after_optimizations-buffer-assignment-values.txt": VALUES,
}


def write_dump(folder: Path) -> Path:
    """The handmade dump, as a compiler leaves it."""
    for name, text in FILES.items():
        (folder / f"module_0001.jit_step.{name}").write_text(text)
    return folder


def handmade(name: str = "v5e-1", residuals: int = 3, capacity: int | None = 13 * MiB) -> Timeline:
    """Ten steps, in MiB: 4 of weights, 3 of residuals, 5 of logits, 2 of gradients, and 1 on the host.

    What the program makes lies in one piece of memory, with a gap of 1 MiB that no array ever fills.
    """
    rows: list[tuple[int, int, int, Category, Pass, int, int]] = [
        (4, 0, 9, "weights", "", 0, 0),
        (residuals, 1, 6, "residuals", "forward", 1, 0),
        (5, 3, 4, "logits", "forward", 1, residuals),
        (2, 5, 8, "gradients", "backward", 1, residuals),
        (1, 2, 6, "residuals", "forward", 2, 0),
    ]
    buffers = tuple(
        Span(
            name=f"fusion.{number}" if made_in else "argument",
            bytes=size * MiB,
            first=first,
            last=last,
            space="host" if lies_in == 2 else "device",
            allocation=lies_in,
            offset=offset * MiB,
            shape=f"f32[{size},512,512]",
            category=category,
            made_in=made_in,
            operation=f"jvp()/<made>/{category}",
            source="model.py:12",
        )
        for number, (size, first, last, category, made_in, lies_in, offset) in enumerate(rows)
    )
    passes: tuple[tuple[Pass, int, int], ...] = (("forward", 0, 4), ("backward", 4, 8), ("optimizer", 8, 10))
    operations = tuple(f"operation {step}" for step in range(10))
    loops = Loop(1, 3, 16), Loop(5, 7, None)
    return Timeline(name, capacity, (residuals + 10) * MiB, 10, buffers, loops, passes, operations)
