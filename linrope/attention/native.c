/* Causal linear attention with rotary positions in the numerator, forward and backward.

       numerator_t  = sum_{s<=t} W_ts (R_t q_t).(R_s k_s) v_s             q, k: mapped features
       normalizer_t = sum_{s<=t} W_ts      q_t . k_s                      W = 1, or exp(c_s - max_{r<=t} c_r)
       out_t        = numerator_t / normalizer_t                          or the numerator alone

   A head is walked in chunks of CHUNK tokens. Let the rows of Q and K be a chunk's rotated queries and keys, those of
   V its values, S the sum of k v' over all earlier chunks; ' transposes.

       forward     P = (Q K') W        O = Q S + P V                      S becomes S + K' V

   and backward, from the last chunk to the first, with G the gradient of the numerators and T the sum of g q' over
   all later chunks:

       P as before                     dQ' = S G' + K' D'                 T becomes T + G' Q
       D' = (V G') W'                  dK  = V T  + D' Q
                                       dV' = T K' + G' P

   Written so, every product is A B with the rows of A and of B contiguous: K and G are transposed on the way in, dQ'
   and dV' on the way out, and nothing else. The normalizer takes no product, for it is q_t . z_t with z_t a running
   sum of keys, and its gradients are running sums too. Where keys carry log-scales c, each sum is relative to the
   running maximum, and no factor exceeds 1.

   REAL is float or double. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__) /* 32 vector registers, else 16 */
#define ROWS 8
#else
#define ROWS 6
#endif
typedef REAL vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef REAL eight __attribute__((vector_size(8 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
enum { LANES = VECTOR_BYTES / sizeof(REAL), PAD = LANES > 8 ? LANES : 8, CHUNK = 32, BLOCK = 8 };

#define SMALLEST (sizeof(REAL) == sizeof(float) ? FLT_MIN : DBL_MIN) /* whose reciprocal is finite */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define VECTOR(address) (*(vector *)(address))
#define EIGHT(address) (*(eight *)(address))

/* ---- what the caller hands over; native.py has the same order ---- */

typedef struct { /* the last axis is contiguous, the three before it have strides, in numbers; data may be NULL */
    REAL *data;
    int64_t b, h, n;
} tensor;

typedef struct {
    int64_t b, h, n, m, e, threads;
    int64_t turned;          /* features that are rotated, an even number */
    int64_t divides, scaled; /* whether there is a normalizer; whether keys carry log-scales */
    union {
        struct {
            tensor query, key, value, out;                                 /* b h n m, b h n m, b h n e, b h n e */
            tensor query_turn, key_turn;                                   /* b h n turned: cosine, sine of each pair */
            tensor log_scale, top, inverse;                                /* b h n: c, its maximum, 1 / normalizer */
            tensor kv, key_sum, scale;                                     /* the state before: b h m e, b h m, b h */
            tensor last_kv, last_key_sum;                                  /* the state after the last token */
            tensor saved;                                                  /* the state before each chunk, if wanted */
            tensor grad_out, grad_query, grad_key, grad_value;             /* as out, query, key, value */
            tensor grad_kv, grad_key_sum, grad_last_kv, grad_last_key_sum; /* the last two may be missing: zeros */
        };
        tensor all[23];
    };
} problem;

static int64_t rounded(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
static int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

/* Numbers in a saved state: m rows of E, then M; rounded for the widest vectors there are, as native.py does. */
static int64_t state_size(const problem *p) {
    return p->m * rounded(p->e, 64 / sizeof(REAL)) + rounded(p->m, 64 / sizeof(REAL));
}

/* The problem of head h of item b alone, where `at` finds a row. */
static problem of_head(const problem *all, int64_t b, int64_t h) {
    problem p = *all;
    for (tensor *x = p.all; x < p.all + 23; x++)
        if (x->data) x->data += b * x->b + h * x->h;
    return p;
}
static REAL *at(const tensor *x, int64_t n) { return x->data + n * x->n; }

/* Log-scales, `log_scale`, `top` and `scale`, are double: they may be large, and their differences count. Their strides
   are in numbers of REAL too. */
#define DOUBLE(address) (*(double *)(address))

/* ---- what one head needs beside that ---- */

typedef struct {
    int64_t M, E;                                   /* m and e, rounded up to whole vectors */
    REAL *q, *k, *Q, *K, *Kt, *V, *O, *P;           /* q, k: not rotated */
    REAL *G, *Gt, *Dt, *dQt, *dK, *dVt, *T, *S, *z; /* T: E rows of M; S: m rows of E */
    REAL *sum, *partial, *delta, *y;
    REAL *own, *step, *carried, *closing, *W; /* see weigh */
    const REAL **ahead;                       /* lines of memory to ask for between tiles, and how many are left */
    int64_t asked;
} workspace;

/* Lines of memory that one chunk asks for at most: see ask. */
static int64_t lines(const problem *p) {
    const int64_t line = 64 / sizeof(REAL), row = rounded(p->m, line) + rounded(p->e, line);
    return (4 * CHUNK * row + state_size(p)) / line;
}

/* Deal `memory` out to the buffers; returns how many numbers that takes, also where `memory` is NULL. */
static int64_t deal(const problem *p, REAL *memory, workspace *w) {
    int64_t M = w->M = rounded(p->m, PAD), E = w->E = rounded(p->e, PAD), used = 0;
    struct {
        REAL **buffer;
        int64_t size;
    } parts[] = {{&w->q, CHUNK * M},      {&w->k, CHUNK * M},   {&w->Q, CHUNK * M},        {&w->K, CHUNK * M},
                 {&w->Kt, CHUNK * M},     {&w->V, CHUNK * E},   {&w->O, CHUNK * E},        {&w->P, CHUNK * CHUNK},
                 {&w->G, CHUNK * E},      {&w->Gt, CHUNK * E},  {&w->Dt, CHUNK * CHUNK},   {&w->dQt, CHUNK * M},
                 {&w->dK, CHUNK * M},     {&w->dVt, CHUNK * E}, {&w->T, E * M},            {&w->S, p->m * E},
                 {&w->z, M},              {&w->sum, M},         {&w->partial, CHUNK * 16}, {&w->delta, CHUNK},
                 {&w->y, M},              {&w->own, CHUNK},     {&w->step, CHUNK + 1},     {&w->carried, CHUNK},
                 {&w->closing, CHUNK},    {&w->W, CHUNK * CHUNK},
                 {(REAL **)&w->ahead, lines(p) * 8 / (int64_t)sizeof(REAL)}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++, used = rounded(used, 16)) {
        *parts[i].buffer = memory ? memory + used : NULL;
        used += parts[i].size;
#ifdef __SANITIZE_ADDRESS__ /* a gap that nobody may touch after each */
        if (memory) ASAN_POISON_MEMORY_REGION(memory + used, 64);
        used += 64 / sizeof(REAL);
#endif
    }
    return used;
}

/* ---- the product ---- */

/* C = A B + add for a tile of rows x vectors, which stays in registers. */
INLINE void tile(const int rows, const int vectors, int64_t depth, const REAL *A, int64_t lda, const REAL *B,
                 int64_t ldb, const REAL *add, REAL *C, int64_t ldc) {
    vector sum[ROWS][2] = {0}, b[2];
    for (int64_t k = 0; k < depth; k++) {
        UNROLL for (int j = 0; j < vectors; j++) b[j] = VECTOR(B + k * ldb + j * LANES);
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int j = 0; j < vectors; j++) sum[i][j] += A[i * lda + k] * b[j];
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vectors; j++) {
            const int64_t place = i * ldc + j * LANES;
            if (add) sum[i][j] += VECTOR(add + place); /* last: a large sum loses small terms that come one by one */
            VECTOR(C + place) = sum[i][j];
        }
}

/* Memory is slower than the arithmetic, unless what the next chunk needs is on its way during the products of this one:
   a few lines after each tile, for many at once would stall. */
static void ask(workspace *w, const tensor *x, int64_t n, int64_t c, int64_t width) {
    for (int64_t t = 0; t < c; t++)
        for (int64_t i = 0; i < width; i += 64 / sizeof(REAL)) w->ahead[w->asked++] = at(x, n + t) + i;
}

INLINE void fetch(workspace *w) {
    for (int i = 0; i < 16 && w->asked; i++) __builtin_prefetch(w->ahead[--w->asked], 0, 2);
}

/* C = A B + add, where A is rows x depth and B depth x columns, a multiple of LANES. `add` lies as C does, or is NULL. */
static void product(workspace *w, int64_t rows, int64_t columns, int64_t depth, const REAL *A, int64_t lda,
                    const REAL *B, int64_t ldb, const REAL *add, REAL *C, int64_t ldc) {
    for (int64_t j = 0; j < columns; j += 2 * LANES)
        for (int64_t i = 0, height, tiles = rounded(rows, ROWS) / ROWS; tiles > 0; tiles--, i += height) {
            height = rounded(rows - i, tiles) / tiles; /* as even as can be: a tile of one row is slow */
            const REAL *a = A + i * lda, *b = B + j, *start = add ? add + i * ldc + j : NULL;
            REAL *c = C + i * ldc + j;
#define HEIGHT(rows)                                                                  \
    case rows:                                                                        \
        if (columns - j > LANES) tile(rows, 2, depth, a, lda, b, ldb, start, c, ldc); \
        else tile(rows, 1, depth, a, lda, b, ldb, start, c, ldc);                     \
        break;
            fetch(w);
            switch (height) {
                HEIGHT(1) HEIGHT(2) HEIGHT(3) HEIGHT(4) HEIGHT(5) HEIGHT(6)
#if ROWS == 8
                HEIGHT(7) HEIGHT(8)
#endif
            }
        }
}

/* ---- packing ---- */

/* c rows of `width` numbers, as CHUNK rows of `padded`; zeros elsewhere. */
static void pack(const tensor *x, int64_t n, int64_t c, int64_t width, REAL *to, int64_t padded) {
    if (c < CHUNK || width < padded) memset(to, 0, CHUNK * padded * sizeof(REAL));
    for (int64_t t = 0; t < c; t++) memcpy(to + t * padded, at(x, n + t), width * sizeof(REAL));
}

static void unpack(const REAL *from, int64_t padded, const tensor *x, int64_t n, int64_t c, int64_t width) {
    for (int64_t t = 0; t < c; t++) memcpy(at(x, n + t), from + t * padded, width * sizeof(REAL));
}

/* Turn the pairs of c rows by the angles of `table` (direction 1), or back (-1). */
static void turn(const problem *p, const tensor *table, int64_t n, int64_t c, REAL direction, const REAL *from,
                 REAL *to, int64_t padded) {
    if (p->turned < padded || c < CHUNK) memcpy(to, from, CHUNK * padded * sizeof(REAL));
    for (int64_t t = 0; t < c; t++, to += padded, from += padded) {
        const REAL *angle = at(table, n + t);
        for (int64_t i = 0; i < p->turned; i += 2) {
            REAL x = from[i], y = from[i + 1], cosine = angle[i], sine = direction * angle[i + 1];
            to[i] = x * cosine - y * sine;
            to[i + 1] = x * sine + y * cosine;
        }
    }
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (__typeof__((x) < (y))){__VA_ARGS__})
#endif

/* rows x columns of x, both multiples of 8, to columns x rows of y. Three perfect shuffles transpose 8 x 8. */
static void transpose(int64_t rows, int64_t columns, const REAL *x, REAL *y) {
    for (int64_t i = 0; i < rows; i += 8)
        for (int64_t j = 0; j < columns; j += 8) {
            eight a[8], b[8];
            UNROLL for (int r = 0; r < 8; r++) a[r] = EIGHT(x + (i + r) * columns + j);
            UNROLL for (int round = 0; round < 3; round++) {
                UNROLL for (int r = 0; r < 4; r++) {
                    b[2 * r] = SHUFFLE(a[r], a[r + 4], 0, 8, 1, 9, 2, 10, 3, 11);
                    b[2 * r + 1] = SHUFFLE(a[r], a[r + 4], 4, 12, 5, 13, 6, 14, 7, 15);
                }
                UNROLL for (int r = 0; r < 8; r++) a[r] = b[r];
            }
            UNROLL for (int r = 0; r < 8; r++) EIGHT(y + (j + r) * rows + i) = a[r];
        }
}

/* Sums of the rows of `partial`, CHUNK x 8, whose second half is scratch. */
static void row_sums(REAL *partial, REAL *sums) {
    REAL *columns = partial + CHUNK * 8;
    transpose(CHUNK, 8, partial, columns);
    for (int t = 0; t < CHUNK; t++) {
        REAL total = 0;
        for (int i = 0; i < 8; i++) total += columns[i * CHUNK + t];
        sums[t] = total;
    }
}

/* ---- one chunk ---- */

/* Factors that the keys' log-scales ask for, given the maximum before the chunk; all 1 where there are none.
   W_ts: of key s for query t. own_t = W_tt. step_t: of sums up to t - 1, at t. carried_t: of earlier chunks, at t.
   closing_s: of key s, after the chunk. */
static void weigh(const problem *p, int64_t n, int64_t c, double before, workspace *w) {
    for (int t = 0; t < CHUNK; t++) w->own[t] = w->step[t] = w->carried[t] = w->closing[t] = 1;
    w->step[CHUNK] = 1;
    if (!p->scaled) return;
    memset(w->W, 0, CHUNK * CHUNK * sizeof(REAL));
    double top = before;
    for (int64_t t = 0; t < c; t++) {
        double scale = DOUBLE(at(&p->log_scale, n + t)), last = top;
        REAL *row = w->W + t * CHUNK;
        if (scale > top) top = scale;
        if (t && top == last) memcpy(row, row - CHUNK, t * sizeof(REAL));
        else
            for (int64_t s = 0; s < t; s++) row[s] = exp((REAL)(DOUBLE(at(&p->log_scale, n + s)) - top));
        row[t] = w->own[t] = exp((REAL)(scale - top));
        w->step[t] = exp((REAL)(last - top));
        w->carried[t] = exp((REAL)(before - top));
        DOUBLE(at(&p->top, n + t)) = top;
    }
    memcpy(w->closing, w->W + (c - 1) * CHUNK, c * sizeof(REAL));
}

/* Multiply each column of x, or where `by_rows` each row, by a factor. */
static void scale(REAL *x, int64_t rows, int64_t columns, const REAL *factor, int by_rows) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) x[i * columns + j] *= factor[by_rows ? i : j];
}

/* q, k, Q, K, K' and V of a chunk, and P = (Q K') W: lower triangular. */
static void load(const problem *p, int64_t n, int64_t c, workspace *w) {
    const int64_t M = w->M;
    pack(&p->query, n, c, p->m, w->q, M);
    pack(&p->key, n, c, p->m, w->k, M);
    pack(&p->value, n, c, p->e, w->V, w->E);
    turn(p, &p->query_turn, n, p->turned ? c : 0, 1, w->q, w->Q, M);
    turn(p, &p->key_turn, n, p->turned ? c : 0, 1, w->k, w->K, M);
    transpose(CHUNK, M, w->K, w->Kt);
    for (int64_t t = 0; t < CHUNK; t += BLOCK)
        product(w, BLOCK, least(CHUNK, rounded(t + BLOCK, LANES)), p->m, w->Q + t * M, M, w->Kt, CHUNK, NULL,
                w->P + t * CHUNK, CHUNK);
    if (p->scaled)
        for (int64_t i = 0; i < CHUNK * CHUNK; i++) w->P[i] *= w->W[i];
    for (int64_t t = 0; t < CHUNK; t++) memset(w->P + t * CHUNK + t + 1, 0, (CHUNK - t - 1) * sizeof(REAL));
}

/* Walk the running key sums z_t of a chunk, those of earlier chunks being z: `partial` gets q_t . z_t, and where
   `gradient` is given, its row t gets delta_t z_t added. Returns with z the sum after the chunk. */
static void walk_keys(int64_t c, const workspace *w, REAL *z, REAL *next, REAL *gradient) {
    const int64_t M = w->M;
    memset(w->sum, 0, M * sizeof(REAL));
    for (int64_t t = 0; t < c; t++) {
        eight dot = {0};
        for (int64_t i = 0; i < M; i += 8) {
            /* The chunk's own sum is kept apart: a small number added to a large one n times would lose it. */
            EIGHT(w->sum + i) = w->step[t] * EIGHT(w->sum + i) + w->own[t] * EIGHT(w->k + t * M + i);
            eight now = EIGHT(w->sum + i) + w->carried[t] * EIGHT(z + i);
            if (gradient) EIGHT(gradient + t * M + i) += w->delta[t] * now;
            else dot += EIGHT(w->q + t * M + i) * now;
        }
        EIGHT(w->partial + t * 8) = dot;
    }
    if (next)
        for (int64_t i = 0; i < M; i += 8) EIGHT(next + i) = EIGHT(w->sum + i) + w->carried[c - 1] * EIGHT(z + i);
}

static void forward_head(const problem *p, workspace *w) {
    const int64_t m = p->m, e = p->e, M = w->M, E = w->E, size = state_size(p);
    REAL *S = p->saved.data ? p->saved.data : w->S, *z = p->saved.data ? S + m * E : w->z;
    double top = p->scaled ? DOUBLE(p->scale.data) : 0;
    memset(S, 0, m * E * sizeof(REAL));
    memset(z, 0, M * sizeof(REAL));
    for (int64_t i = 0; i < m; i++) memcpy(S + i * E, at(&p->kv, i), e * sizeof(REAL));
    memcpy(z, p->key_sum.data, m * sizeof(REAL));

    for (int64_t n = 0; n < p->n; n += CHUNK) {
        const int64_t c = least(CHUNK, p->n - n);
        weigh(p, n, c, top, w);
        w->asked = 0;
        const int64_t next = least(CHUNK, p->n - n - CHUNK);
        ask(w, &p->query, n + CHUNK, next, m);
        ask(w, &p->key, n + CHUNK, next, m);
        ask(w, &p->value, n + CHUNK, next, e);
        ask(w, &p->out, n, c, e);
        load(p, n, c, w);
        product(w, CHUNK, E, m, w->Q, M, S, E, NULL, w->O, E);
        if (p->scaled) scale(w->O, CHUNK, E, w->carried, 1);
        for (int64_t t = 0; t < CHUNK; t += BLOCK)
            product(w, BLOCK, E, t + BLOCK, w->P + t * CHUNK, CHUNK, w->V, E, w->O + t * E, w->O + t * E, E);

        REAL *S_next = p->saved.data && n + CHUNK < p->n ? S + size : w->S;
        REAL *z_next = S_next == w->S ? w->z : S_next + m * E;
        walk_keys(c, w, z, z_next, NULL);
        if (p->divides) {
            REAL inverse[CHUNK];
            row_sums(w->partial, inverse);
            for (int64_t t = 0; t < c; t++) { /* a row with nothing to attend to is 0, and so is its gradient */
                inverse[t] = fabs(inverse[t]) < SMALLEST ? 0 : 1 / inverse[t];
                *at(&p->inverse, n + t) = inverse[t];
            }
            scale(w->O, c, E, inverse, 1);
        }
        unpack(w->O, E, &p->out, n, c, e);
        if (p->scaled) {
            scale(w->V, CHUNK, E, w->closing, 1);
            for (int64_t i = 0; i < m * E; i++) S_next[i] = w->carried[c - 1] * S[i];
            top = DOUBLE(at(&p->top, n + c - 1));
        }
        product(w, m, E, CHUNK, w->Kt, CHUNK, w->V, E, p->scaled ? S_next : S, S_next, E);
        S = S_next, z = z_next;
    }
    for (int64_t i = 0; i < m; i++) memcpy(at(&p->last_kv, i), S + i * E, e * sizeof(REAL));
    memcpy(p->last_key_sum.data, z, m * sizeof(REAL));
}

static void backward_head(const problem *p, workspace *w) {
    const int64_t m = p->m, e = p->e, M = w->M, E = w->E, size = state_size(p);
    memset(w->T, 0, E * M * sizeof(REAL));
    memset(w->y, 0, M * sizeof(REAL));
    for (int64_t i = 0; i < e && p->grad_last_kv.data; i++)
        for (int64_t j = 0; j < m; j++) w->T[i * M + j] = at(&p->grad_last_kv, j)[i];
    if (p->grad_last_key_sum.data) memcpy(w->y, p->grad_last_key_sum.data, m * sizeof(REAL));

    for (int64_t g = (p->n - 1) / CHUNK; g >= 0; g--) {
        const int64_t n = g * CHUNK, c = least(CHUNK, p->n - n);
        REAL *S = at(&p->saved, g), *z = S + m * E;
        weigh(p, n, c, !p->scaled ? 0 : DOUBLE(g ? at(&p->top, n - 1) : p->scale.data), w);
        w->asked = 0;
        const int64_t next = n ? CHUNK : 0;
        ask(w, &p->query, n - CHUNK, next, m);
        ask(w, &p->key, n - CHUNK, next, m);
        ask(w, &p->value, n - CHUNK, next, e);
        ask(w, &p->grad_out, n - CHUNK, next, e);
        if (p->divides) ask(w, &p->out, n - CHUNK, next, e);
        if (next)
            for (int64_t i = 0; i < size; i += 64 / sizeof(REAL)) w->ahead[w->asked++] = S - size + i;
        ask(w, &p->grad_query, n, c, m);
        ask(w, &p->grad_key, n, c, m);
        ask(w, &p->grad_value, n, c, e);
        load(p, n, c, w);

        /* out = inverse numerator: G = inverse dO, and the normalizer's gradient is delta = -inverse (out . dO). */
        pack(&p->grad_out, n, c, e, w->G, E);
        memset(w->delta, 0, CHUNK * sizeof(REAL));
        if (p->divides) {
            REAL inverse[CHUNK] = {0};
            pack(&p->out, n, c, e, w->O, E);
            for (int64_t t = 0; t < CHUNK; t++) {
                eight dot = {0};
                for (int64_t i = 0; i < E; i += 8) dot += EIGHT(w->O + t * E + i) * EIGHT(w->G + t * E + i);
                EIGHT(w->partial + t * 8) = dot;
            }
            row_sums(w->partial, w->delta);
            for (int64_t t = 0; t < c; t++) inverse[t] = *at(&p->inverse, n + t);
            for (int64_t t = 0; t < CHUNK; t++) w->delta[t] *= -inverse[t];
            scale(w->G, CHUNK, E, inverse, 1);
        }
        transpose(CHUNK, E, w->G, w->Gt);
        for (int64_t s = 0; s < CHUNK; s += BLOCK) {
            const int64_t t = s / LANES * LANES;
            product(w, BLOCK, CHUNK - t, e, w->V + s * E, E, w->Gt + t, CHUNK, NULL, w->Dt + s * CHUNK + t, CHUNK);
        }
        if (p->scaled)
            for (int64_t s = 0; s < CHUNK; s++)
                for (int64_t t = s; t < CHUNK; t++) w->Dt[s * CHUNK + t] *= w->W[t * CHUNK + s];
        for (int64_t s = 0; s < CHUNK; s++) memset(w->Dt + s * CHUNK, 0, s * sizeof(REAL));

        product(w, e, CHUNK, m, w->T, M, w->Kt, CHUNK, NULL, w->dVt, CHUNK);
        if (p->scaled) scale(w->dVt, e, CHUNK, w->closing, 0);
        for (int64_t s = 0; s < CHUNK; s += 16)
            product(w, e, 16, CHUNK - s, w->Gt + s, CHUNK, w->P + s * CHUNK + s, CHUNK, w->dVt + s, w->dVt + s, CHUNK);

        if (p->scaled) scale(w->V, CHUNK, E, w->closing, 1);
        product(w, CHUNK, M, e, w->V, E, w->T, M, NULL, w->dK, M);
        for (int64_t s = 0; s < CHUNK; s += BLOCK)
            product(w, BLOCK, M, CHUNK - s, w->Dt + s * CHUNK + s, CHUNK, w->Q + s * M, M, w->dK + s * M,
                    w->dK + s * M, M);

        if (p->scaled) scale(w->Gt, E, CHUNK, w->carried, 0);
        product(w, m, CHUNK, e, S, E, w->Gt, CHUNK, NULL, w->dQt, CHUNK);
        for (int64_t t = 0; t < CHUNK; t += 16)
            product(w, m, 16, t + 16, w->Kt, CHUNK, w->Dt + t, CHUNK, w->dQt + t, w->dQt + t, CHUNK);

        if (p->scaled)
            for (int64_t i = 0; i < E * M; i++) w->T[i] *= w->carried[c - 1];
        product(w, e, M, CHUNK, w->Gt, CHUNK, w->Q, M, w->T, w->T, M);

        REAL *dQ = w->Q, *dV = w->V; /* those are used up */
        transpose(M, CHUNK, w->dQt, dQ);
        transpose(E, CHUNK, w->dVt, dV);
        turn(p, &p->query_turn, n, p->turned ? c : 0, -1, dQ, w->K, M);
        turn(p, &p->key_turn, n, p->turned ? c : 0, -1, w->dK, w->Q, M);
        if (p->divides || p->grad_last_key_sum.data) {
            walk_keys(c, w, z, NULL, w->K);
            memset(w->sum, 0, M * sizeof(REAL));
            REAL after = 1; /* the factor of later chunks */
            for (int64_t t = c - 1; t >= 0; t--) {
                for (int64_t i = 0; i < M; i += 8) {
                    EIGHT(w->sum + i) = w->step[t + 1] * EIGHT(w->sum + i) + w->delta[t] * EIGHT(w->q + t * M + i);
                    EIGHT(w->Q + t * M + i) += w->own[t] * (EIGHT(w->sum + i) + after * EIGHT(w->y + i));
                }
                after *= w->step[t];
            }
            for (int64_t i = 0; i < M; i += 8)
                EIGHT(w->y + i) = w->step[0] * EIGHT(w->sum + i) + after * EIGHT(w->y + i);
        }
        unpack(w->K, M, &p->grad_query, n, c, m);
        unpack(w->Q, M, &p->grad_key, n, c, m);
        unpack(dV, E, &p->grad_value, n, c, e);
    }
    for (int64_t i = 0; i < e; i++)
        for (int64_t j = 0; j < m; j++) at(&p->grad_kv, j)[i] = w->T[i * M + j];
    memcpy(p->grad_key_sum.data, w->y, m * sizeof(REAL));
}

/* ---- all heads ---- */

static int each_head(const problem *p, void (*run)(const problem *, workspace *)) {
    int failed = 0;
#pragma omp parallel num_threads(p->threads)
    {
        workspace w;
        REAL *memory = aligned_alloc(64, rounded(deal(p, NULL, &w) * sizeof(REAL), 64));
        if (memory) deal(p, memory, &w);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < p->b * p->h; i++) {
            const problem one = of_head(p, i / p->h, i % p->h);
            if (memory) run(&one, &w);
            else
#pragma omp atomic write
                failed = 1;
        }
        free(memory);
    }
    return failed;
}

int forward(const problem *p) { return each_head(p, forward_head); }
int backward(const problem *p) { return each_head(p, backward_head); }
