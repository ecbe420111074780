package claims

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// Do calls fn with a context that ends when the claim does, frees the key when fn has returned,
// and returns the error of fn. [context.Cause] tells why the claim ended: [tenure.ErrLost] or
// [tenure.ErrDeadline], if the session was lost, or the key's row no longer names it as after a
// failover that has lost commits, which is then an error of Do as well;
// [tenure.ErrResigned] by [Keys.Release] and [Keys.RequestRelease]; [tenure.ErrShutdown] when the session closes. The
// context also ends with ctx. Whatever the reason, the key is kept until fn has returned.
//
// A claim that this session does not hold is [tenure.ErrLost], and one for which a func runs
// already is [tenure.ErrInvalid]; then fn is not called.
func (k *Keys) Do(ctx context.Context, c Claim, fn func(context.Context) error) error {
	if fn == nil {
		return fmt.Errorf("tenure: do %s: %w: fn is nil", c, tenure.ErrInvalid)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	call, err := k.begin(c, cancel)
	if err != nil {
		return fmt.Errorf("tenure: do %s: %w", c, err)
	}
	defer k.finish(c, call) // also after a panic
	err = fn(ctx)
	if cause := context.Cause(ctx); errors.Is(cause, tenure.ErrLost) || errors.Is(cause, tenure.ErrDeadline) || errors.Is(cause, ErrOverdue) {
		err = errors.Join(fmt.Errorf("tenure: do %s: %w", c, cause), err)
	}
	return err
}

func (k *Keys) begin(c Claim, cancel context.CancelCauseFunc) (*call, error) {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if err := k.holds(c); err != nil {
		return nil, err
	}
	if k.running[c.Key.ID] != nil {
		return nil, fmt.Errorf("%w: a func runs for it", tenure.ErrInvalid)
	}
	call := &call{of: k.now, token: c.Token, cancel: cancel, freed: make(chan struct{})}
	k.running[c.Key.ID] = call
	if k.now.asked[c.Key.ID] {
		cancel(errRequested)
	}
	k.now.term.busy.Add(1)
	return call, nil
}

// finish frees the key of a func that has returned, unless its session is lost.
func (k *Keys) finish(c Claim, call *call) {
	defer call.of.term.busy.Done()
	defer close(call.freed)
	k.s.mu.Lock()
	delete(k.running, c.Key.ID)
	delete(k.strays, c.Key.ID)
	var batches []*batch
	if !call.kept {
		batches = k.free(call.of, c.row())
	}
	k.s.mu.Unlock()
	for _, b := range batches {
		<-b.done
	}
}

// Holds reports whether this session holds the claim, and may rely on it: see
// [tenure.Term.Valid]. It does no I/O.
func (k *Keys) Holds(c Claim) bool {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	return k.holds(c) == nil
}

// holds returns nil if the session holds a claim. The caller holds the mutex.
func (k *Keys) holds(c Claim) error {
	switch {
	case c.Key.Type != k.kind:
		return fmt.Errorf("%w: its kind is not %q", tenure.ErrInvalid, k.kind)
	case k.now == nil || c.Session != k.now.term.id:
		return fmt.Errorf("%w: its session %s has ended, or is another's", tenure.ErrLost, c.Session)
	}
	if over := k.s.over(k.now.term); over != nil {
		return fmt.Errorf("%w: its session has ended: %w", tenure.ErrLost, over)
	}
	if token, held := k.now.tokens[c.Key.ID]; !held || token != c.Token {
		return fmt.Errorf("%w: it was released, or passed on", tenure.ErrLost)
	}
	return nil
}

// Len returns how many claims the session holds.
func (k *Keys) Len() int {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	return k.len()
}

func (k *Keys) len() int {
	if k.now == nil || k.now.term.over != nil {
		return 0
	}
	return len(k.now.tokens)
}

// Release frees keys. If a func of [Keys.Do] runs for one, Release tells it to return, with
// the cause [tenure.ErrResigned], and waits until it has; a func that releases its own claim
// passes its own context. If ctx is done before all are free, Release returns its cause, and
// they become free all the same.
//
// If one of the claims is not held by this session, [tenure.ErrLost], or is given twice,
// [tenure.ErrInvalid], none is released.
func (k *Keys) Release(ctx context.Context, claims ...Claim) error {
	waits, err := k.release(claims)
	if err != nil {
		return fmt.Errorf("tenure: release %s: %w", k.kind, err)
	}
	for _, freed := range waits {
		select {
		case <-freed:
		case <-ctx.Done():
			return fmt.Errorf("tenure: release %s: %w", k.kind, context.Cause(ctx))
		}
	}
	return nil
}

func (k *Keys) release(claims []Claim) (waits []chan struct{}, err error) {
	if err := validIDs(keysOf(claims)); err != nil {
		return nil, err
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	for _, c := range claims {
		if err := k.holds(c); err != nil {
			return nil, fmt.Errorf("%s: %w", c, err)
		}
	}
	var idle []objects.Claim
	for _, c := range claims {
		if call := k.running[c.Key.ID]; call != nil {
			call.cancel(tenure.ErrResigned)
			waits = append(waits, call.freed)
		} else {
			idle = append(idle, c.row())
		}
	}
	for _, b := range k.free(k.now, idle...) {
		waits = append(waits, b.done)
	}
	return waits, nil
}

// free has rows freed, unless their session is lost. Rows that come at the same moment share
// statements. The caller holds the mutex, and either the term is not over or it is busy.
func (k *Keys) free(h *holdings, rows ...objects.Claim) (batches []*batch) {
	for _, r := range rows {
		h.drop(r.ID)
		h.freeing[r.ID]++
		if n := len(h.toFree); n == 0 || len(h.toFree[n-1].rows) == perStatement {
			h.toFree = append(h.toFree, &batch{done: make(chan struct{})})
			batches = append(batches, h.toFree[n])
		} else if len(batches) == 0 {
			batches = append(batches, h.toFree[n-1])
		}
		b := h.toFree[len(h.toFree)-1]
		b.rows = append(b.rows, r)
	}
	if len(rows) > 0 && !h.frees {
		h.frees = true
		h.term.busy.Go(func() { k.freeBatches(h) })
	}
	return batches
}

// freeBatches frees what is to be freed, until there is nothing more.
func (k *Keys) freeBatches(h *holdings) {
	runtime.Gosched() // funcs that return at the same moment share a statement
	var hinted time.Time
	for {
		k.s.mu.Lock()
		if len(h.toFree) == 0 {
			h.frees = false
			k.s.mu.Unlock()
			return
		}
		b := h.toFree[0]
		h.toFree = h.toFree[1:]
		k.s.mu.Unlock()

		locked := k.freeBatch(h, b.rows)
		k.s.mu.Lock()
		h.freed(objects.Without(b.rows, locked))
		last := len(h.toFree) == 0
		k.s.mu.Unlock()
		if len(locked) == 0 {
			close(b.done)
		} else { // by a fenced write, which may hang: others don't wait for it
			h.term.busy.Go(func() { k.freeLocked(h, b, locked) })
		}
		if last || time.Since(hinted) > coalesce {
			h.term.busy.Go(func() { k.s.hint(keyOf(k.kind)) }) // beside the next batch
			hinted = time.Now()
		}
	}
}

// drop notes that a claim is held no more. The caller holds the mutex.
func (h *holdings) drop(id string) {
	if _, held := h.tokens[id]; held {
		delete(h.tokens, id)
		delete(h.asked, id)
		h.changes++
	}
}

// freed notes that claims have been freed. The caller holds the mutex.
func (h *holdings) freed(claims []objects.Claim) {
	for _, c := range claims {
		if h.freeing[c.ID]--; h.freeing[c.ID] == 0 {
			delete(h.freeing, c.ID)
		}
	}
}

// freeLocked frees the rest of a batch, as soon as nobody locks it any more.
func (k *Keys) freeLocked(h *holdings, b *batch, rows []objects.Claim) {
	locked := rows
	for tries := 0; len(rows) > 0 && pace.Sleep(h.term.ctx, 5*time.Millisecond<<min(tries, 7)); tries++ {
		rows = k.freeBatch(h, rows)
	}
	k.s.mu.Lock()
	h.freed(locked)
	k.s.mu.Unlock()
	close(b.done)
	k.s.hint(keyOf(k.kind))
}

// freeBatch frees rows, and returns those that somebody has locked. It tries until it has an
// answer, because nobody else would free them as long as the session lives. A row that the
// database refuses to free is freed later.
func (k *Keys) freeBatch(h *holdings, rows []objects.Claim) (locked []objects.Claim) {
	t := h.term
	for failures := 0; t.ctx.Err() == nil; failures++ {
		locked, refused, err := k.s.free(t.ctx, k.table, t.id, k.kind, rows)
		if err == nil {
			if len(refused) > 0 {
				k.s.mu.Lock()
				k.doubt(h, doubt{until: time.Now()}, idsOf(refused)...)
				k.s.mu.Unlock()
			}
			return locked
		}
		k.s.retries.Log(k.s.cfg.Logger, slog.LevelWarn, "keys are not freed, trying again", err, "kind", k.kind)
		pace.Sleep(t.ctx, pace.Retry(k.s.cfg.RenewInterval, longestRetryPause, failures))
	}
	return nil
}

func idsOf(rows []objects.Claim) []string {
	ids := make([]string, 0, len(rows))
	for _, r := range rows {
		ids = append(ids, r.ID)
	}
	return ids
}

func tokensOf(rows []objects.Claim) []int64 {
	tokens := make([]int64, 0, len(rows))
	for _, r := range rows {
		tokens = append(tokens, r.Token)
	}
	return tokens
}
