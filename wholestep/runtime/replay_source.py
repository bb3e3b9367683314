"""The C++ text of a step that is done again: all checks first, then numbers, copies, the graph's launch and results.

It needs no header: Python, torch and the CUDA driver tell where their functions are. `replay.py` fills in its records.
"""

from __future__ import annotations

from .record import WALK

#: what the call answers: the step is done; the batch is another, or lies otherwise; something has changed, or at most
#: hyper-parameters; pinned memory is still read; the stream is another; the driver failed. All but the first and the
#: last have changed nothing.
ANSWERS = ("DONE", "OTHER", "LAID", "CHANGED", "GROUPS", "WAIT", "STREAM", "FAILED")
DONE, OTHER, LAID, CHANGED, GROUPS, WAIT, STREAM, FAILED = range(len(ANSWERS))
#: pieces of pinned memory that take turns, in two halves
HALF = 8
#: what a number in a cell is
KINDS = {"float64": 0, "float32": 1, "bool": 2}
#: arithmetic on numbers of the host: the ops of backends/host.py, by their place here
OPERATIONS = (
    *("add", "sub", "mul", "div", "pow", "neg", "abs", "sqrt", "exp", "log", "reciprocal", "cast"),
    *("lt", "le", "gt", "ge", "eq", "ne", "select", "maximum", "minimum"),
)

SOURCE = (
    WALK
    + "".join(f"enum {{ {', '.join(names).upper()} }};\n" for names in (ANSWERS, KINDS, OPERATIONS))
    + f"static const long HALF_RING = {HALF};\n"
    + """
struct Operation { long kind, out, x, y, z; };
struct Cell { long offset, kind, from; };
struct Fixed { char* object; char* memory; long bytes, source; };
struct Result { char* memory; long bytes; };
// Counters side by side. A write to all is counted as one to the first, which is the first that was written down.
// With an offset, not -1, they lie behind the cells and arrive with them.
struct Counters { char* memory; long offset, count, wide, here, from; char* first; Walk* written; };

struct Replay {
  // functions: of Python, of torch, of the CUDA driver
  void* (*item)(void*, long);
  int (*address)(void*, void**);
  int (*dimensions)(void*, i64*);
  int (*sizes)(void*, i64**);
  int (*strides)(void*, i64**);
  int (*type)(void*, i32*);
  int (*device)(void*, i32*);
  int (*index)(void*, i32*);
  void (*bump)(void*);
  int (*process)();
  int (*stream)(i32, void**);
  int (*context)(void**);
  int (*to_device)(void*, const void*, unsigned long, void*);
  int (*on_device)(void*, void*, unsigned long, void*);
  int (*fill)(void*, u32, unsigned long, void*);
  int (*launch)(void*, void*);
  int (*query)(void*);
  int (*record)(void*, void*);
  // where the step runs: in which process, on which device, with which stream and context
  long owner, number;
  void *known_stream, *known_context, *graph, *event[2];
  // what must be as it was, and what must be zero
  long walks, quiet;
  Walk *groups, **walk;
  volatile char* news;
  // the batch and the results
  long fixed, results, inside;
  void* tensor_type;
  Fixed* batch;
  Result* result;
  // numbers: registers, what is computed, which of them is the counter, where they go
  long operations, cells, vectors, counter;
  double* registers;
  Operation* operation;
  Cell* cell;
  Counters* vector;
  // seed and step; pinned memory, where a piece of it goes, its bytes, those to the next piece, pieces used so far
  i64 seed, *step;
  char *ring, *there;
  long size, apart, turn;
  // the call of the driver that failed, and its answer
  long failed, error;
};

static bool unlike(int (*read)(void*, i32*), void* one, void* other) {
  i32 a, b;
  return read(one, &a) || read(other, &b) || a != b;
}

static bool differ(int (*read)(void*, i64**), void* one, void* other, i64 count) {
  i64 *a, *b;
  if (read(one, &a) || read(other, &b)) return true;
  for (i64 i = 0; i < count; ++i)
    if (a[i] != b[i]) return true;
  return false;
}

// Whether a tensor of a batch is like the one that it is copied to.
static int like(const Replay& r, void* object, void* fixed, bool copied) {
  if (*(void**)((char*)object + sizeof(void*)) != r.tensor_type) return OTHER;
  void* tensor = (char*)object + r.inside;
  i64 have, want;
  if (r.dimensions(tensor, &have) || r.dimensions(fixed, &want) || have != want) return OTHER;
  if (unlike(r.type, tensor, fixed) || unlike(r.device, tensor, fixed) || unlike(r.index, tensor, fixed)) return OTHER;
  if (differ(r.sizes, tensor, fixed, want)) return OTHER;
  return !copied && differ(r.strides, tensor, fixed, want) ? LAID : DONE;
}

static double computed(const Operation& o, const double* v) {
  double x = v[o.x], y = v[o.y];
  switch (o.kind) {
    case ADD: return x + y;
    case SUB: return x - y;
    case MUL: return x * y;
    case DIV: return x / y;
    case POW: {
      double z = __builtin_pow(x, y);
      return __builtin_isinf(z) && __builtin_isfinite(x) && __builtin_isfinite(y) ? __builtin_inf() : z;
    }
    case NEG: return -x;
    case ABS: return __builtin_fabs(x);
    case SQRT: return __builtin_sqrt(x);
    case EXP: return __builtin_exp(x);
    case LOG: return __builtin_log(x);
    case RECIPROCAL: return 1.0 / x;
    case LT: return x < y;
    case LE: return x <= y;
    case GT: return x > y;
    case GE: return x >= y;
    case EQ: return x == y;
    case NE: return x != y;
    case SELECT: return x ? y : v[o.z];
    case MAXIMUM: return x != x || y != y ? __builtin_nan("") : y > x ? y : x;
    case MINIMUM: return x != x || y != y ? __builtin_nan("") : y < x ? y : x;
    default: return x;
  }
}

static void write_number(char* at, long kind, double number) {
  if (kind == FLOAT64) *(double*)at = number;
  else if (kind == FLOAT32) *(float*)at = (float)number;
  else *at = number != 0;
}

static bool holds_number(const Counters& c, double number) {
  for (long i = 0; i < c.count; ++i)
    if (c.wide ? ((double*)c.memory)[i] != number : ((float*)c.memory)[i] != (float)number) return false;
  return true;
}

// Everything that could refuse a step. Changes registers alone.
static int look(Replay& r, void* batch, bool copied, void** stream) {
  void* context;
  if (r.process() != r.owner || r.context(&context) || context != r.known_context) return CHANGED;
  if (r.stream((i32)r.number, stream)) return CHANGED;
  for (long i = 0; i < r.fixed; ++i)
    if (int answer = like(r, r.item(batch, r.batch[i].source), r.batch[i].object + r.inside, copied)) return answer;
  if (!unchanged(r.groups)) return GROUPS;
  for (long i = 0; i < r.walks; ++i)
    if (!unchanged(r.walk[i])) return CHANGED;
  for (long i = 0; i < r.quiet; ++i)
    if (r.news[i]) return CHANGED;
  for (long i = 0; i < r.vectors; ++i) {
    const Counters& c = r.vector[i];
    if (!(c.here ? holds_number(c, r.registers[r.counter]) : unchanged(c.written))) return CHANGED;
  }
  if (*stream != r.known_stream) return STREAM;
  long turn = r.turn % (2 * HALF_RING);
  if (r.turn >= 2 * HALF_RING && turn % HALF_RING == 0 && r.query(r.event[turn / HALF_RING])) return WAIT;
  for (long i = 0; i < r.operations; ++i) r.registers[r.operation[i].out] = computed(r.operation[i], r.registers);
  for (long i = 1; i < r.vectors; ++i)
    if (r.registers[r.vector[i].from] != r.registers[r.vector[0].from]) return CHANGED;
  return DONE;
}

#define DRIVER(number, call) if ((r->error = (call))) { r->failed = number; return FAILED; }

// `copied`: somebody else has copied the batch.
extern "C" int NAME(Replay* r, void* batch, void* results, int copied) {
  void *stream, *source;
  if (int answer = look(*r, batch, copied, &stream)) return answer;
  long turn = r->turn % (2 * HALF_RING);
  char* here = r->ring + turn * r->apart;
  i64* key = (i64*)here;
  key[0] = r->seed, key[1] = *r->step, key[2] = 0;
  for (long i = 0; i < r->cells; ++i)
    write_number(here + r->cell[i].offset, r->cell[i].kind, r->registers[r->cell[i].from]);
  for (long i = 0; i < r->vectors; ++i)
    for (long j = 0; j < r->vector[i].count && r->vector[i].offset >= 0; ++j)
      ((float*)(here + r->vector[i].offset))[j] = (float)r->registers[r->vector[i].from];
  DRIVER(0, r->to_device(r->there, here, r->size, stream))
  for (long i = 0; i < r->fixed && !copied; ++i) {
    if (!r->batch[i].bytes) continue;
    if (r->address((char*)r->item(batch, r->batch[i].source) + r->inside, &source)) return CHANGED;
    DRIVER(1, r->on_device(r->batch[i].memory, source, r->batch[i].bytes, stream))
  }
  DRIVER(2, r->launch(r->graph, stream))
  ++*r->step, ++r->turn;
  for (long i = 0; i < r->vectors; ++i) {
    const Counters& c = r->vector[i];
    double number = r->registers[c.from];
    if (c.here) {
      for (long j = 0; j < c.count; ++j)
        write_number(c.memory + j * (c.wide ? 8 : 4), c.wide ? FLOAT64 : FLOAT32, number);
      continue;
    }
    if (c.offset < 0) DRIVER(3, r->fill(c.memory, bits_of((float)number), c.count, stream))
    r->bump(c.first + r->inside);
    c.written->words[0] = c.written->version(c.first + r->inside);
  }
  if (r->vectors) r->registers[r->counter] = r->registers[r->vector[0].from];
  for (long i = 0; i < r->results; ++i) {
    if (!r->result[i].bytes) continue;
    if (r->address((char*)r->item(results, i) + r->inside, &source)) { r->failed = 4; return FAILED; }
    DRIVER(4, r->on_device(source, r->result[i].memory, r->result[i].bytes, stream))
  }
  if (turn % HALF_RING == HALF_RING - 1) DRIVER(5, r->record(r->event[turn / HALF_RING], stream))
  return DONE;
}
"""
)
