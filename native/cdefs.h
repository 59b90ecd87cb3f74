/* What Python sees through cffi. Structs with `...` take their true offsets from the compiler.
 * wait_histogram is left out: cffi would take a plain pointer to an array of atomics, which newer
 * compilers refuse; the snapshot has a copy. */
#define SHR_MAGIC ...
#define SHR_LAYOUT_VERSION ...
#define SHR_HEADER_LENGTH ...
#define SHR_LINE_PAIR ...
#define SHR_KIND_RING ...
#define SHR_KIND_BLOB ...
#define SHR_CAPACITY_MAX ...
#define SHR_RECORD_HEADER_LENGTH ...
#define SHR_RECORD_ALIGNMENT ...
#define SHR_HISTOGRAM_BINS ...
#define SHR_END_NEVER ...
#define SHR_END_ATTACHED ...
#define SHR_END_CLOSED ...
#define SHR_ROLE_OWNER ...
#define SHR_ROLE_PRODUCER ...
#define SHR_ROLE_CONSUMER ...
#define SHR_ROLE_REMOVER ...
#define SHR_DONE ...
#define SHR_NOT_NOW ...
#define SHR_TOO_LARGE ...
#define SHR_UNUSABLE ...
#define SHR_CORRUPT ...
#define SHR_PEER_FINISHED ...
#define SHR_PEER_LOST ...
#define SHR_CLAIM_OPEN ...
#define SHR_NO_CLAIM ...
#define SHR_NOTHING_DRAINED ...
#define SHR_BAD_FRAME ...
#define SHR_UNRELEASED ...
#define SHR_WAIT_MAX ...
#define SHR_CHECK_INTERVAL_NS ...
#define SHR_FRAME_VERSION ...
#define SHR_FRAME_HEADER_LENGTH ...
#define SHR_COLUMN_ENTRY_LENGTH ...
#define SHR_COLUMNS_MAX ...

struct shr_end_state {
    uint32_t state;
    uint32_t generation;
    uint32_t pid;
    uint64_t attached_ns;
    ...;
};
struct shr_end_statistics {
    uint64_t records;
    uint64_t bytes;
    ...;
};
struct shr_header {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t header_length;
    uint32_t kind;
    uint32_t owner_pid;
    uint64_t capacity;
    uint64_t segment_id;
    uint64_t created_ns;
    uint64_t payload_length;
    uint32_t ready;
    uint32_t retired;
    uint64_t tail;
    struct shr_end_state producer;
    struct shr_end_statistics producer_statistics;
    uint64_t head;
    struct shr_end_state consumer;
    struct shr_end_statistics consumer_statistics;
    uint32_t producer_parked;
    uint32_t consumer_parked;
    ...;
};
struct shr_record_header {
    uint32_t length;
    uint8_t type;
    uint8_t flags;
    uint16_t reserved;
};

typedef struct {
    ...;
} shr_producer;
typedef struct {
    ...;
} shr_consumer;

uint64_t shr_payload_length_max(uint64_t capacity);
int shr_readable(shr_consumer *c);
int shr_writable(shr_producer *p, uint64_t length);
int shr_consumer_state(shr_producer *p);
int shr_producer_state(shr_consumer *c);

void *shr_map(int fd, uint64_t capacity, int writable, int doubled, int *error);
void shr_unmap(void *base, uint64_t capacity, int doubled);
void *shr_map_header(int fd, int *error);
void shr_header_init(struct shr_header *header, uint32_t kind, uint64_t capacity, uint64_t segment_id,
                     uint64_t payload_length, uint32_t owner_pid, uint64_t start_position);
uint32_t shr_header_ready(const struct shr_header *header);
void shr_header_retire(struct shr_header *header);
uint32_t shr_header_retired(const struct shr_header *header);
int shr_role_take(int fd, int role);
int shr_role_drop(int fd, int role);
int shr_role_held(int fd, int role);

struct shr_end_snapshot {
    uint32_t state, generation, pid, parked;
    uint64_t attached_ns, position, records, bytes, batches, stalls, parks, parked_ns, wakes_sent, high_water,
        active_ns, waiting_since_ns, beats;
};
struct shr_snapshot {
    struct shr_end_snapshot producer, consumer;
    uint64_t wait_histogram[64];
};
void shr_snapshot_take(const struct shr_header *header, struct shr_snapshot *out);
uint64_t shr_now_ns(void);

typedef struct {
    ...;
} shr_bell;
int shr_wait(shr_consumer *const *consumers, uint32_t consumer_count, shr_producer *const *producers,
             const uint64_t *needs, uint32_t producer_count, shr_bell *bell, uint64_t spin_ns,
             uint64_t timeout_ns);
void shr_wait_over(shr_consumer *const *consumers, uint32_t consumer_count, shr_producer *const *producers,
                   uint32_t producer_count);
void shr_bell_ring(shr_bell *bell);
int shr_bell_is_rung(const shr_bell *bell);
int shr_bell_answer(shr_bell *bell);
