package claims

import (
	"cmp"
	"context"

	"github.com/tenurelib/tenure"
)

// Detached returns how many claims the session remembers that it has detached.
func (w *Worker) Detached() int {
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	return len(w.kind.ledger.detached)
}

// Workers returns how many workers the queue knows.
func (q *Queue) Workers() int { return len(q.allWorkers()) }

// StoreOf returns the store of a session.
func StoreOf(s *Session) tenure.Store { return s.store }

// LookAtAll compares all rows that name the session with its claims.
func (k *Keys) LookAtAll() error { return k.kind.lookAtAll(k.kind.ledger) }

// Compare compares the claims of the current term with their rows, as after a failover.
func (k *Keys) Compare() error { return k.kind.compareIn(k.kind.ledger.term.ctx, k.kind.ledger.term) }

// LimitOf returns how many slots there are for this process.
func LimitOf(s *Slots) int { return s.n }

// Len returns how many claims the session holds.
func (k *Keys) Len() int { return k.kind.size() }

// Len returns how many claims the session holds.
func (w *Worker) Len() int { return w.kind.size() }

func (k *kind) size() int {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	return k.ledger.size()
}

// Detach ends the session's own use of slots without freeing them.
func (s *Slots) Detach(claims ...Claim) error { return s.keys.Detach(claims...) }

// Running returns how many funcs run, for all kinds together.
func (s Status) Running() (n int) {
	for _, k := range s.Kinds {
		n += k.Running
	}
	return n
}

// TryTake takes a slot without waiting for one.
func (s *Slots) TryTake(ctx context.Context) (Claim, error) {
	got, err := s.claimer.tryNow(ctx, s.ids())
	if len(got) > 0 {
		return got[0], nil
	}
	return Claim{}, cmp.Or(err, tenure.ErrHeld)
}
