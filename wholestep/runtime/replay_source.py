"""The C++ text of a step that is done again: all checks first, then numbers, copies, the graph's launch and results.

It needs no header: Python, torch and the CUDA driver tell where their functions are. `replay.py` fills in its records.
"""

from __future__ import annotations

from .record_source import WALK

#: what the call answers: the step is done; the batch is another, or lies otherwise; something has changed, or at most
#: hyper-parameters; pinned memory is still read; the stream is another; the driver failed; the caller must have the
#: step's lock and ask torch more. All but the first and FAILED have changed nothing.
ANSWERS = ("DONE", "OTHER", "LAID", "CHANGED", "GROUPS", "WAIT", "STREAM", "FAILED", "IN_TURN")
DONE, OTHER, LAID, CHANGED, GROUPS, WAIT, STREAM, FAILED, IN_TURN = range(len(ANSWERS))
#: pieces of pinned memory that take turns, in two halves
HALF = 8
#: what a number in a cell is
KINDS = {"float64": 0, "float32": 1, "bool": 2}
#: tensors of a batch at most
MOST_PARTS = 64
#: arithmetic on numbers of the host: the ops of backends/host.py, by their place here
OPERATIONS = (
    *("add", "sub", "mul", "div", "pow", "neg", "abs", "sqrt", "exp", "log", "reciprocal", "cast"),
    *("lt", "le", "gt", "ge", "eq", "ne", "select", "maximum", "minimum"),
)

SOURCE = (
    WALK
    + "".join(f"enum {{ {', '.join(names).upper()} }};\n" for names in (ANSWERS, KINDS, OPERATIONS))
    + f"static const long HALF_RING = {HALF}, MOST_PARTS = {MOST_PARTS}, IN_BYTES = {bytes.__basicsize__ - 1};\n"
    + """
struct Operation { long kind, out, x, y, z; };
struct Cell { long offset, kind, from; };
struct Fixed { char* object; char* memory; long bytes, source; };
struct Result { char* memory; long bytes; };
// Counters side by side. A write to all is counted as one to the first, which is the first that was written down.
// With an offset, not -1, they lie behind the cells and arrive with them.
struct Counters { char* memory; long offset, count, wide, here, from; char* first; Walk* written; };
// What a table must have under a key.
struct Entry { void *table, *key, *value; };
// A learning rate: where it is, and the register that it goes to, or -1.
struct Rate { void *table, *key; long place; };

struct Replay {
  // functions: of Python, of torch, of the CUDA driver
  void* (*item)(void*, long);
  long (*parts_of)(void*);
  void* (*part)(void*, long);
  long (*members)(void*);
  void* (*get)(void*, void*);
  int (*set)(void*, void*, void*);
  int (*append)(void*, void*);
  void* (*number_of)(double);
  void* (*answer_of)(long);
  void (*drop)(void*);
  int (*address)(void*, void**);
  int (*dimensions)(void*, i64*);
  int (*sizes)(void*, i64**);
  int (*strides)(void*, i64**);
  int (*type)(void*, i32*);
  int (*device)(void*, i32*);
  int (*index)(void*, i32*);
  void (*bump)(void*);
  bool (*observed)();
  bool (*autocast)(signed char);
  bool (*inference)();
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
  // what must be as it was, and what must be zero: also how many hold the step's lock, unless the caller does
  long walks, quiet, entries;
  Walk *groups, **walk;
  volatile char* news;
  Entry* entry;
  i64* holders;
  // how long steps took; what tells schedulers of a step: the optimizer's attributes, which of them, and True
  void *durations, *optimizer, *called, *yes;
  // the batch, the names of its tensors or null, and the results
  long parts, fixed, results, inside;
  void *tensor_type, *dict_type, **key;
  Fixed* batch;
  Result* result;
  // numbers: registers, what is computed, which of them is the counter, where they go
  long operations, cells, vectors, counter;
  double* registers;
  Operation* operation;
  Cell* cell;
  Counters* vector;
  // learning rates by their groups, what is computed from them, and the groups as they were
  long rates, settled;
  Rate* rate;
  Operation* settle;
  Walk* kept_groups;
  void* float_type;
  double (*double_of)(void*);
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

// The tensors of a batch; false where it has another form.
static bool flat(const Replay& r, void* batch, void* named, void** tensors) {
  long count = r.parts_of(batch), more = r.members(named);
  if (!r.key) {
    if (more || count != r.parts) return false;
    for (long i = 0; i < count; ++i) tensors[i] = r.part(batch, i);
    return true;
  }
  if (count) {
    if (more || count != 1) return false;
    named = r.part(batch, 0);
    if (*(void**)((char*)named + sizeof(void*)) != r.dict_type) return false;
  }
  if (r.members(named) != r.parts) return false;
  for (long i = 0; i < r.parts; ++i)
    if (!(tensors[i] = r.get(named, r.key[i]))) return false;
  return true;
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

// Takes over learning rates, where the optimizer's groups differ in nothing else from what was written down.
static bool new_rates(Replay& r) {
  const Walk& w = *r.kept_groups;
  if (!r.rates) return false;
  Pen pen = {w.words, false, w.count, 0};
  for (long i = 0; i < w.tables; ++i) {
    long at = 0, members = 0;
    void *key, *value;
    for (; w.next(w.table[i], &at, &key, &value); ++members) {
      if (!pen.note(key)) return false;
      bool rate = key == r.rate[i].key && *(void**)((char*)value + sizeof(void*)) == r.float_type;
      if (!pen.note(value) && !rate) return false;
    }
    if (!pen.note((i64)members)) return false;
  }
  for (long i = 0; i < r.rates; ++i)
    if (r.rate[i].place >= 0) r.registers[r.rate[i].place] = r.double_of(r.get(r.rate[i].table, r.rate[i].key));
  for (long i = 0; i < r.settled; ++i) r.registers[r.settle[i].out] = computed(r.settle[i], r.registers);
  return write_down(r.groups);
}

// Everything that could refuse a step. Changes registers alone.
static int look(Replay& r, void** tensors, bool copied, void** stream) {
  void* context;
  if (r.process() != r.owner || r.context(&context) || context != r.known_context) return CHANGED;
  if (r.stream((i32)r.number, stream)) return CHANGED;
  for (long i = 0; i < r.fixed; ++i)
    if (int answer = like(r, tensors[r.batch[i].source], r.batch[i].object + r.inside, copied)) return answer;
  for (long i = 0; i < r.entries; ++i)
    if (r.get(r.entry[i].table, r.entry[i].key) != r.entry[i].value) return CHANGED;
  if (!unchanged(r.groups) && !new_rates(r)) return GROUPS;
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
static int step(Replay* r, void* batch, void* named, void* results, bool copied) {
  void *stream, *source, *tensors[MOST_PARTS];
  if (!flat(*r, batch, named, tensors)) return OTHER;
  if (int answer = look(*r, tensors, copied, &stream)) return answer;
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
    if (r->address((char*)tensors[r->batch[i].source] + r->inside, &source)) return CHANGED;
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
    count_first(c.written, c.written->version(c.first + r->inside));
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

struct Time { long seconds, nanoseconds; };
extern "C" int clock_gettime(int, Time*);

static double now() {
  Time time;
  clock_gettime(1, &time);
  return time.seconds + 1e-9 * time.nanoseconds;
}

// A function of Python that is bound to bytes, in which is the address of a Replay. Its arguments: tensors of the batch
// in a tuple, and others by name; a list for the results; and, from who has the lock alone, whether it was copied.
extern "C" void* NAME(void* self, void** given, long count) {
  Replay* r = *(Replay**)((char*)self + IN_BYTES);
  if (count == 4) return r->answer_of(step(r, given[0], given[1], given[2], given[3] == r->yes));
  double start = now();
  if (*r->holders || r->observed() || r->autocast(0) || r->autocast(1) || r->inference()) return r->answer_of(IN_TURN);
  if (int answer = step(r, given[0], given[1], given[2], false)) return r->answer_of(answer);
  if (r->get(r->optimizer, r->called) != r->yes && r->set(r->optimizer, r->called, r->yes)) return 0;
  void* took = r->number_of(now() - start);
  if (!took || r->append(r->durations, took)) return 0;
  r->drop(took);
  return r->answer_of(DONE);
}
"""
)
