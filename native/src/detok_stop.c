#include "shmring/detok_stop.h"

#include <errno.h>
#include <string.h>

#define ROOT 0u

static uint32_t child_of(const struct detok_stop_node *nodes, uint32_t node, uint8_t byte) {
    uint32_t child = nodes[node].child;
    while (child != 0 && nodes[child].byte != byte)
        child = nodes[child].sibling;
    return child;
}

/* Falls back no more often, in all, than it climbed: so a byte costs the same on average
 * whatever the stop strings. */
static uint32_t step(const struct detok_stops *stops, uint32_t node, uint8_t byte) {
    while (node != ROOT) {
        uint32_t child = child_of(stops->nodes, node, byte);
        if (child != 0)
            return child;
        node = stops->nodes[node].fall_back;
    }
    return stops->root[byte];
}

static int add(struct detok_stops *stops, uint32_t *node_count, uint32_t order) {
    struct detok_stop_node *nodes = stops->nodes;
    uint32_t start = stops->offsets[order], end = stops->offsets[order + 1];
    uint32_t node = ROOT;
    for (uint32_t i = start; i < end; i++) {
        uint8_t byte = stops->text[i];
        uint32_t child = node == ROOT ? stops->root[byte] : child_of(nodes, node, byte);
        if (child == 0) {
            if (*node_count == stops->node_capacity)
                return -ENOBUFS;
            child = (*node_count)++;
            nodes[child] = (struct detok_stop_node){.sibling = nodes[node].child,
                                                    .text_end = i + 1,
                                                    .depth = i + 1 - start,
                                                    .held_length = i + 1 - start,
                                                    .found = DETOK_NO_STOP,
                                                    .byte = byte};
            nodes[node].child = child;
            if (node == ROOT)
                stops->root[byte] = child;
        }
        node = child;
    }
    if (nodes[node].found == DETOK_NO_STOP) /* the same one twice: the first counts */
        nodes[node].found = (int32_t)order;
    return 0;
}

/* Links in order of length, so what a node falls back to is complete before it. */
static void link_all(struct detok_stops *stops) {
    struct detok_stop_node *nodes = stops->nodes;
    uint32_t last = ROOT;
    for (uint32_t child = nodes[ROOT].child; child != 0; child = nodes[child].sibling) {
        nodes[last].next = child;
        last = child;
    }
    for (uint32_t node = nodes[ROOT].next; node != 0; node = nodes[node].next) {
        const struct detok_stop_node *shorter = &nodes[nodes[node].fall_back];
        if (nodes[node].child == 0) /* a whole stop string and no part of another */
            nodes[node].held_length = shorter->held_length;
        if (shorter->found != DETOK_NO_STOP &&
            (nodes[node].found == DETOK_NO_STOP || shorter->found < nodes[node].found))
            nodes[node].found = shorter->found;
        for (uint32_t child = nodes[node].child; child != 0; child = nodes[child].sibling) {
            nodes[child].fall_back = step(stops, nodes[node].fall_back, nodes[child].byte);
            nodes[last].next = child;
            last = child;
        }
    }
}

int detok_stops_build(struct detok_stops *stops) {
    if (stops->count > (uint32_t)INT32_MAX || stops->offsets[0] != 0)
        return -EINVAL;
    if (stops->node_capacity == 0)
        return -ENOBUFS;
    memset(stops->root, 0, sizeof stops->root);
    stops->nodes[ROOT] = (struct detok_stop_node){.found = DETOK_NO_STOP};
    uint32_t node_count = 1;
    for (uint32_t order = 0; order < stops->count; order++) {
        if (stops->offsets[order + 1] <= stops->offsets[order])
            return -EINVAL;
        int result = add(stops, &node_count, order);
        if (result != 0)
            return result;
    }
    link_all(stops);
    return 0;
}

uint32_t detok_stops_scan(const struct detok_stops *stops, uint32_t node, const uint8_t **at,
                          const uint8_t *end, int armed, int32_t *found) {
    const uint8_t *p = *at;
    *found = DETOK_NO_STOP;
    while (p < end) {
        if (node == ROOT) { /* most text is here: on to a byte that begins a stop string */
            while (p < end && stops->root[*p] == 0)
                p++;
            if (p == end)
                break;
        }
        node = step(stops, node, *p++);
        if (armed && stops->nodes[node].found != DETOK_NO_STOP) {
            *found = stops->nodes[node].found;
            break;
        }
    }
    *at = p;
    return node;
}

const uint8_t *detok_stops_held(const struct detok_stops *stops, uint32_t node, uint32_t *length) {
    *length = stops->nodes[node].held_length;
    return stops->text + (stops->nodes[node].text_end - *length);
}
