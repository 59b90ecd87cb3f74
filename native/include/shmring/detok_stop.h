/* Finds stop strings in text that comes in pieces: an Aho-Corasick automaton per set of them.
 *
 * A set is compiled once and read by any number of requests; a request's own state is one
 * number, its node. A node stands for the longest end of the text so far that begins a stop
 * string, so what is held back can be written from the node alone and is stored nowhere.
 *
 * Works on UTF-8. Pieces are whole characters; then so is everything released: a stop string
 * begins with the first byte of a character, so a byte-wise match does too.
 *
 * No allocation: the caller gives the memory, and keeps it for as long as the set is in use.
 */
#ifndef SHMRING_DETOK_STOP_H
#define SHMRING_DETOK_STOP_H

#include <stddef.h>
#include <stdint.h>

#define DETOK_NO_STOP (-1)

/* One node of the trie. Nodes are numbered from the root, 0; where 0 is no child it says "none". */
struct detok_stop_node {
    uint32_t fall_back;   /* where to go on when no child fits */
    uint32_t child;       /* the first one */
    uint32_t sibling;     /* the next child of the same parent */
    uint32_t next;        /* in order of length; used while building */
    uint32_t text_end;    /* the node's text is the `depth` bytes of the set's text before here */
    uint32_t depth;       /* length of the node's text */
    uint32_t held_length; /* of its longest end that is a proper prefix of a stop string */
    int32_t found;        /* the first stop string in order that ends here, or DETOK_NO_STOP */
    uint8_t byte;         /* that leads here */
    uint8_t reserved[3];
};

/* A compiled set. The caller fills in all but `root` and `nodes`' contents. */
struct detok_stops {
    const uint8_t *text;     /* all stop strings, back to back */
    const uint32_t *offsets; /* count + 1 */
    /* What a finish column says when one of them was found: bytes that only pass through. */
    const uint8_t *details;
    const uint32_t *details_offsets; /* count + 1 */
    struct detok_stop_node *nodes;
    uint32_t node_capacity; /* bytes of all stop strings plus 1 are enough */
    uint32_t count;
    uint32_t details_length_max;
    uint32_t root[256]; /* the node after one byte at the root */
};

/* Compiles the set. 0, or -EINVAL (a stop string is empty, or offsets fall), or -ENOBUFS. */
int detok_stops_build(struct detok_stops *stops);

/* Looks on through [*at, end) from `node`, and returns the node it comes to. *at moves behind
 * the last byte looked at. *found: a stop string that ends there, and nothing behind it was
 * looked at; or DETOK_NO_STOP, and *at is `end`. Not `armed`: stop strings are passed over. */
uint32_t detok_stops_scan(const struct detok_stops *stops, uint32_t node, const uint8_t **at,
                          const uint8_t *end, int armed, int32_t *found);

/* The text that is held back at `node`; *length bytes. */
const uint8_t *detok_stops_held(const struct detok_stops *stops, uint32_t node, uint32_t *length);

#endif
