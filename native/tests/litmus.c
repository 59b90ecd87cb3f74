/* Counts lost wakes: one thread publishes while the other falls asleep.
 *
 *     litmus ROUNDS
 *
 * A wake that is lost shows as a sleep that only its timeout ends. With all four accesses of the
 * handshake seq_cst there is none; run.sh shows that there are some with release and acquire. */
#include "harness.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define SLEEP_NS 500000000U /* a lost wake costs this much and no more */

#define LOST_MAX 3

/* Both start a round together; one publishes, the other goes to sleep. Random delays move the two
 * stores of the handshake over each other. */
struct table {
    struct ring ring;
    _Atomic uint64_t round, ready;
    uint64_t rounds, lost;
};

static void delay(struct dice *d) {
    for (volatile uint64_t i = roll(d) % 120; i > 0; i--) {
    }
}

static void *publish(void *argument) {
    struct table *t = argument;
    struct dice dice = {3};
    for (uint64_t n = 1; n <= t->rounds; n++) {
        while (atomic_load(&t->ready) != n) {
        }
        atomic_store(&t->round, n);
        delay(&dice);
        uint64_t now = shr_now_ns();
        CHECK(shr_push(&t->ring.producer, &now, sizeof now, 0, 0, 1) == SHR_DONE);
    }
    return NULL;
}

static void *fall_asleep(void *argument) {
    struct table *t = argument;
    struct dice dice = {5};
    shr_consumer *c = &t->ring.consumer;
    for (uint64_t n = 1; n <= t->rounds; n++) {
        shr_record record;
        uint64_t published, started;
        atomic_store(&t->ready, n);
        while (atomic_load(&t->round) != n) {
        }
        delay(&dice);
        started = shr_now_ns();
        int answer = shr_wait(&c, 1, NULL, NULL, 0, NULL, 0, SLEEP_NS);
        uint64_t over = shr_now_ns();
        while (shr_next(c, &record) == SHR_NOT_NOW) {
        }
        CHECK(answer == SHR_DONE || answer == SHR_NOT_NOW);
        memcpy(&published, record.payload, sizeof published);
        /* slept to the end of its time, beside a record that came when that time had hardly begun */
        t->lost += over - started >= SLEEP_NS && over - published >= SLEEP_NS / 2;
        if (t->lost == LOST_MAX) {
            printf("litmus: round=%" PRIu64 " lost=%d: enough\n", n, LOST_MAX);
            exit(1);
        }
        CHECK(shr_release(c) == SHR_DONE);
    }
    return NULL;
}

static uint64_t handshake(uint64_t rounds) {
    static struct table t;
    pthread_t threads[2];
    ring_make(&t.ring, 4096, 0);
    t.rounds = rounds;
    CHECK(pthread_create(&threads[0], NULL, publish, &t) == 0);
    CHECK(pthread_create(&threads[1], NULL, fall_asleep, &t) == 0);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    struct shr_snapshot snapshot;
    shr_snapshot_take(t.ring.base, &snapshot);
    printf("litmus: rounds=%" PRIu64 " sleeps=%" PRIu64 " wakes=%" PRIu64 " lost=%" PRIu64 "\n", rounds,
           snapshot.consumer.parks, snapshot.producer.wakes_sent, t.lost);
    ring_free(&t.ring);
    return t.lost;
}

/* A sandbox that does not know futex_waitv may answer EPERM: the wait must still sleep. */
static void refused_waitv(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct sock_filter code[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 449, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {sizeof code / sizeof *code, code};
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
            printf("refused waitv: skipped, no seccomp here\n");
            exit(0);
        }
        struct ring a, b;
        ring_make(&a, 4096, 0);
        ring_make(&b, 4096, 0);
        shr_consumer *both[] = {&a.consumer, &b.consumer};
        CHECK(shr_wait(both, 2, NULL, NULL, 0, NULL, 0, 100000000U) == SHR_NOT_NOW);
        struct shr_snapshot snapshot;
        shr_snapshot_take(a.base, &snapshot);
        printf("refused waitv: sleeps=%" PRIu64 "\n", snapshot.consumer.parks);
        CHECK(snapshot.consumer.parks <= 150); /* a hundred milliseconds, looked at every one of them */
        CHECK(shr_push(&b.producer, "x", 1, 0, 0, 1) == SHR_DONE);
        CHECK(shr_wait(both, 2, NULL, NULL, 0, NULL, 0, 100000000U) == SHR_DONE);
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    uint64_t rounds = argc > 1 ? strtoull(argv[1], NULL, 10) : 300000;
    refused_waitv();
    return handshake(rounds) == 0 ? 0 : 1;
}
