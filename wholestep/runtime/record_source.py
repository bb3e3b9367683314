"""The C++ text of records: what was written down of tables, lists and tensors, and whether all is still so.

It needs no header: Python and torch tell where their functions are. `record.py` fills in its structures.
"""

from __future__ import annotations

#: Without `words` it counts them, -1 where not all can be read, and writes tensors down. With `keep` it writes down the
#: words. Else 1 where all is as it was written down. Members come before their number, so that a table that has grown
#: differs before the end of the words. Tensors are read from memory where it is known where they keep what; torch's
#: functions are asked first whether they can be read.
WALK = """
// A tensor: the Python object, which is held; its tensor of C++, that one's storage and where that one's memory is.
// Each is looked at only once the one before is known to be the same, and so to be there still.
struct Seen { char *object, *tensor, *storage; void* data; i64 offset; long form; };
// Dimensions and strides; -1 dimensions: they do not count.
struct Form { i64 dimensions, strides[5]; };
// A tensor that trains, as its flag says, or that autograd knows nothing of.
struct Trained { char *object, *tensor, *meta; };
struct Counted { char *object, *tensor, *counter; i64 version; };

struct Walk {
  int (*next)(void*, long*, void**, void**);
  long (*length)(void*);
  void* (*item)(void*, long);
  int (*address)(void*, void**);
  int (*dimensions)(void*, i64*);
  int (*strides)(void*, i64**);
  i64 (*version)(const void*);
  bool (*trains)(const void*);
  long inside, tag, keep, count, tagged, tables, lists, placed, laid, trained, counted;
  // where things are: see `Places` in Python; zeros where that is not known
  long storage, data, form, meta, flag, counter, version_in_counter;
  char** tags;
  void **table, **list;
  char **place, **lie, **train, **number;
  i64* words;
  // what was written down of tensors, how much of it, and those of which only torch's functions tell
  Seen* seen;
  Form* forms;
  Trained* known;
  Counted* counts;
  char **far, **asked;
  long form_count, known_count, far_count, asked_count;
  // how often Python has told of a change of watched tables, and how often by the last look at them
  i64 *told, heard;
};

struct Pen {
  i64* words;
  bool keep;
  long limit, count;
  // Whether a word is the one written down.
  bool note(i64 word) {
    long at = count++;
    if (!words) return true;
    if (at >= limit) return false;
    if (keep) words[at] = word;
    return words[at] == word;
  }
  bool note(void* pointer) { return note((i64)pointer); }
};

// Strides of a form: dimensions, sizes and strides of up to five, offset. Those of more dimensions lie elsewhere.
static const long INSIDE = 5;
// How many tensors ahead memory is asked for.
static const long AHEAD = 10;

template <class T> static T read_at(const char* at) { return *(const T*)at; }

static bool note_strides(const Walk& w, Pen& pen, char* handle) {
  i64 dimensions, *strides;
  if (w.dimensions(handle, &dimensions) || w.strides(handle, &strides) || !pen.note(dimensions)) return false;
  for (i64 d = 0; d < dimensions; ++d)
    if (!pen.note(strides[d])) return false;
  return true;
}

static bool note_place(const Walk& w, Pen& pen, char* handle) {
  void* address;
  return !w.address(handle, &address) && pen.note(address);
}

// Tables, lists, and tensors through torch's functions: all of them, or those that are not known otherwise.
static bool walk(const Walk& w, Pen& pen, bool all, bool calm = false) {
  for (long i = 0; i < w.tagged && !calm; ++i) {
    if (i + 16 < w.tagged) __builtin_prefetch(w.tags[i + 16] + w.tag);
    if (!pen.note(read_at<i64>(w.tags[i] + w.tag))) return false;
  }
  if (calm) pen.count += w.tagged;
  for (long i = 0; i < w.tables; ++i) {
    long at = 0, members = 0;
    void *key, *value;
    for (; w.next(w.table[i], &at, &key, &value); ++members)
      if (!pen.note(key) || !pen.note(value)) return false;
    if (!pen.note((i64)members)) return false;
  }
  for (long i = 0; i < w.lists; ++i) {
    long members = w.length(w.list[i]);
    if (!pen.note((i64)members)) return false;
    for (long j = 0; j < members; ++j)
      if (!pen.note(w.item(w.list[i], j))) return false;
  }
  for (long i = 0; i < w.placed && all; ++i)
    if (!note_place(w, pen, w.place[i] + w.inside)) return false;
  for (long i = 0; i < w.laid && all; ++i)
    if (!note_place(w, pen, w.lie[i] + w.inside)) return false;
  for (long i = 0; i < (all ? w.laid : w.far_count); ++i)
    if (!note_strides(w, pen, (all ? w.lie : w.far)[i] + w.inside)) return false;
  for (long i = 0; i < (all ? w.trained : w.asked_count); ++i)
    if (!pen.note((i64)w.trains(read_at<void*>((all ? w.train : w.asked)[i] + w.inside)))) return false;
  for (long i = 0; i < w.counted && all; ++i)
    if (!pen.note(w.version(w.number[i] + w.inside))) return false;
  return true;
}

// ---- tensors, read from memory

static bool same_form(const Walk& w, const char* tensor, const Form& form) {
  const i64* now = (const i64*)(tensor + w.form);
  if (form.dimensions < 0) return true;
  if (now[0] != form.dimensions) return false;
  for (long d = 0; d < form.dimensions; ++d)
    if (now[1 + INSIDE + d] != form.strides[d]) return false;
  return true;
}

static char* tensor_of(const Walk& w, const char* object) { return read_at<char*>(object + w.inside); }

static i64 offset_of(const Walk& w, const char* tensor) { return read_at<i64>(tensor + w.form + 8 * (1 + 2 * INSIDE)); }

static void ask_for(const Walk& w, const Seen& s) {
  __builtin_prefetch(s.object + w.inside);
  __builtin_prefetch(s.tensor + w.storage);
  if (s.form) __builtin_prefetch(s.tensor + w.storage + 64);
  __builtin_prefetch(s.tensor + w.form + 8 * (1 + 2 * INSIDE));
  __builtin_prefetch(s.storage + w.data);
}

static bool same_seen(const Walk& w) {
  long count = w.placed + w.laid;
  for (long i = 0; i < AHEAD && i < count; ++i) ask_for(w, w.seen[i]);
  for (long i = 0; i < count; ++i) {
    if (i + AHEAD < count) ask_for(w, w.seen[i + AHEAD]);
    const Seen& s = w.seen[i];
    if (tensor_of(w, s.object) != s.tensor || read_at<char*>(s.tensor + w.storage) != s.storage) return false;
    if (offset_of(w, s.tensor) != s.offset || !same_form(w, s.tensor, w.forms[s.form])) return false;
    if (read_at<void*>(s.storage + w.data) != s.data) return false;
  }
  return true;
}

static bool same_known(const Walk& w) {
  for (long i = 0; i < w.known_count; ++i) {
    if (i + AHEAD < w.known_count) __builtin_prefetch(w.known[i + AHEAD].meta + w.flag);
    const Trained& t = w.known[i];
    if (tensor_of(w, t.object) != t.tensor || read_at<char*>(t.tensor + w.meta) != t.meta) return false;
    if (t.meta && !read_at<bool>(t.meta + w.flag)) return false;
  }
  return true;
}

static bool same_counts(const Walk& w) {
  for (long i = 0; i < w.counted; ++i) {
    if (i + AHEAD < w.counted) {
      const Counted& later = w.counts[i + AHEAD];
      __builtin_prefetch(later.object + w.inside);
      __builtin_prefetch(later.tensor + w.counter);
      __builtin_prefetch(later.counter + w.version_in_counter);
    }
    const Counted& c = w.counts[i];
    if (tensor_of(w, c.object) != c.tensor || read_at<char*>(c.tensor + w.counter) != c.counter) return false;
    if (read_at<u32>(c.counter + w.version_in_counter) != c.version) return false;
  }
  return true;
}

extern "C" void qsort(void*, unsigned long, unsigned long, int (*)(const void*, const void*));

static int by_address(const void* one, const void* other) {
  const char *a = ((const Seen*)one)->tensor, *b = ((const Seen*)other)->tensor;
  return a < b ? -1 : a > b;
}

static bool write_seen(Walk& w) {
  w.form_count = w.far_count = 0;
  w.forms[w.form_count++] = Form{-1};
  for (long i = 0; i < w.placed + w.laid; ++i) {
    Seen& s = w.seen[i];
    s.object = i < w.placed ? w.place[i] : w.lie[i - w.placed];
    s.tensor = tensor_of(w, s.object);
    s.storage = read_at<char*>(s.tensor + w.storage);
    if (!s.storage) return false;
    s.data = read_at<void*>(s.storage + w.data);
    s.offset = offset_of(w, s.tensor);
    s.form = 0;
    if (i < w.placed) continue;
    const i64* form = (const i64*)(s.tensor + w.form);
    if (form[0] > INSIDE) {
      w.far[w.far_count++] = s.object;
      continue;
    }
    for (s.form = 1; s.form < w.form_count && !same_form(w, s.tensor, w.forms[s.form]);) ++s.form;
    if (s.form < w.form_count) continue;
    Form& made = w.forms[w.form_count++];
    made.dimensions = form[0];
    for (long d = 0; d < form[0]; ++d) made.strides[d] = form[1 + INSIDE + d];
  }
  qsort(w.seen, w.placed + w.laid, sizeof(Seen), by_address);
  return true;
}

static bool write_trained(Walk& w) {
  w.known_count = w.asked_count = 0;
  for (long i = 0; i < w.trained; ++i) {
    char *object = w.train[i], *tensor = tensor_of(w, object), *meta = read_at<char*>(tensor + w.meta);
    if (!meta || read_at<bool>(meta + w.flag)) w.known[w.known_count++] = Trained{object, tensor, meta};
    else w.asked[w.asked_count++] = object;
  }
  return true;
}

static bool write_counts(Walk& w) {
  for (long i = 0; i < w.counted; ++i) {
    Counted& c = w.counts[i];
    c.object = w.number[i];
    c.tensor = tensor_of(w, c.object);
    c.counter = read_at<char*>(c.tensor + w.counter);
    if (!c.counter) return false;
    c.version = read_at<u32>(c.counter + w.version_in_counter);
  }
  return true;
}

// Whether all is as it was written down.
static bool unchanged(Walk* w) {
  if (w->count < 0) return false;
  i64 told = w->told ? *w->told : -1;
  Pen pen = {w->words, false, w->count, 0};
  if (!walk(*w, pen, !w->form, told >= 0 && told == w->heard)) return false;
  w->heard = told;
  return !w->form || (same_seen(*w) && same_known(*w) && same_counts(*w));
}

// As many words as before; false where there are more now.
static bool write_down(Walk* w) {
  Pen pen = {w->words, true, w->count, 0};
  if (w->told) w->heard = *w->told;
  return walk(*w, pen, !w->form);
}

// A write to the first tensor that is counted, by ourselves.
static void count_first(Walk* w, i64 version) {
  if (w->form) w->counts[0].version = version;
  else w->words[0] = version;
}
"""
SOURCE = (
    WALK
    + """
extern "C" int NAME(Walk* w) {
  if (w->words) return w->keep ? write_down(w) : unchanged(w);
  Pen ask = {0, false, 0, 0}, pen = {0, false, 0, 0};
  bool readable = walk(*w, ask, true) && (!w->form || (write_seen(*w) && write_trained(*w) && write_counts(*w)));
  w->count = readable && walk(*w, pen, !w->form) ? pen.count : -1;
  return readable;
}
"""
)
#: counts what Python tells of, which is one number for all tables that are watched
WATCH = """
static i64 told;
static int tell(int event, void* table, void* key, void* value) { ++told; return 0; }
extern "C" int NAME(void** found) {
  found[0] = (void*)tell, found[1] = &told;
  return 0;
}
"""
