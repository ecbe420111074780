package tenure

import (
	"context"
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
	c.log().Info("takeover confirmed", "predecessor", term.predecessor().Holder, "token", term.Token(), "took", time.Since(began))
	return nil
}

// fence calls FencePredecessor until it succeeds, or ctx is done.
func (c *Coordinator) fence(ctx context.Context, prev Holding) error {
	for failures := 0; ; failures++ {
		err := c.cfg.FencePredecessor(ctx, prev)
		if err == nil {
			return nil
		}
		c.report("predecessor not fenced, trying again", err)
		if !sleep(ctx, c.retryPause(failures)) {
			return ctx.Err()
		}
	}
}
