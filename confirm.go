package tenure

import (
	"context"
	"fmt"
	"maps"
	"time"
)

const confirmName = "fence predecessor"

// mustConfirm reports whether a term's job may not begin at once: the lease was
// taken over from a holder that had not released it.
func (c *Coordinator) mustConfirm(term *Term) bool {
	return len(term.predecessors) > 0 && (c.cfg.Confirmations > 0 || c.cfg.FencePredecessor != nil)
}

// confirm returns nil when the predecessor of a term is surely gone. It runs as a
// job's funcs do: its context ends with the term.
func (c *Coordinator) confirm(ctx context.Context, term *Term, k *keeper) error {
	began := time.Now()
	if k.confirmed != nil {
		select {
		case <-k.confirmed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if c.cfg.FencePredecessor != nil {
		for _, prev := range term.predecessors {
			if err := c.fence(ctx, prev); err != nil {
				return err
			}
		}
	}
	last := term.predecessors[len(term.predecessors)-1]
	c.log().Info("takeover confirmed", "predecessor", last.Holder, "token", term.Token(), "took", time.Since(began))
	// Renewed at once, for the record still says that it is not: if this replica
	// crashes, a predecessor that has recovered is not fenced again.
	term.unconfirmed.Store(false)
	if err := c.renew(ctx, term); err != nil {
		c.renewalFailed(term, err)
	}
	return nil
}

// fence calls FencePredecessor until it succeeds, or ctx is done; or until it has
// failed for so long that another replica may do better.
func (c *Coordinator) fence(ctx context.Context, prev Holding) error {
	patience := c.lease.cfg.TTL
	attempts, cancel := context.WithTimeout(ctx, longestFencing*patience)
	defer cancel()
	for began, failures := time.Now(), 0; ; failures++ {
		prev.Labels = maps.Clone(prev.Labels) // the record's, and the caller may change them
		err := c.cfg.FencePredecessor(attempts, prev)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Since(began) >= patience:
			return fmt.Errorf("%w: predecessor %s not fenced for %v: %w", ErrUnhealthy, prev.Holder, time.Since(began).Round(time.Millisecond), err)
		}
		c.report("predecessor not fenced, trying again", err)
		if !sleep(ctx, c.retryPause(failures)) {
			return ctx.Err()
		}
	}
}

// longestFencing is the most TTLs for which one call of FencePredecessor may last.
const longestFencing = 10
