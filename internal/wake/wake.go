// Package wake passes hints on to the watches that wait for them. All stores build their watches on
// it, wherever their hints come from.
package wake

import (
	"maps"
	"slices"
	"sync"
)

// Hub has the watches of one store, by their keys. All methods are safe for concurrent use.
type Hub[K comparable] struct {
	mu      sync.Mutex
	live    bool
	watches map[K][]*Watch[K]
}

// NewHub returns a hub. Live says whether hints already arrive at it.
func NewHub[K comparable](live bool) *Hub[K] {
	return &Hub[K]{live: live, watches: make(map[K][]*Watch[K])}
}

// Watch begins to watch a key.
func (h *Hub[K]) Watch(key K) *Watch[K] {
	w := &Watch[K]{hub: h, key: key, c: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watches[key] = append(h.watches[key], w)
	return w
}

// Wake wakes all watches of the key. It never blocks.
func (h *Hub[K]) Wake(key K) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, w := range h.watches[key] {
		w.Wake()
	}
}

// SetLive says whether hints arrive from now on. It wakes all watches, because they may have
// missed a hint while none arrived.
func (h *Hub[K]) SetLive(live bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !live && !h.live {
		return
	}
	h.live = live
	for _, watches := range h.watches {
		for _, w := range watches {
			w.Wake()
		}
	}
}

// Keys returns the watched keys, in no particular order.
func (h *Hub[K]) Keys() []K {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Collect(maps.Keys(h.watches))
}

// Watch is one watch of one key.
type Watch[K comparable] struct {
	hub *Hub[K]
	key K
	c   chan struct{} // has room for one hint: hints that were not received become one
}

// Wake wakes this watch alone. It never blocks.
func (w *Watch[K]) Wake() {
	select {
	case w.c <- struct{}{}:
	default:
	}
}

// C receives when there is a hint.
func (w *Watch[K]) C() <-chan struct{} { return w.c }

// Live reports whether hints arrive.
func (w *Watch[K]) Live() bool {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	return w.hub.live
}

// Stop ends the watch. It may be called twice.
func (w *Watch[K]) Stop() {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	watches := w.hub.watches[w.key]
	if i := slices.Index(watches, w); i >= 0 {
		watches = slices.Delete(watches, i, i+1)
	}
	if len(watches) == 0 {
		delete(w.hub.watches, w.key)
		return
	}
	w.hub.watches[w.key] = watches
}
