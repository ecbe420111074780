package claims

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/report"
)

// Listing is who owned what at one moment.
type Listing struct {
	Claims []Claim   // in no order
	At     time.Time // the moment, by the database's clock; zero if nobody owned anything
}

// Age returns how old a claim of the listing was, by the database's clock: negative if the clock
// was set back since.
func (l Listing) Age(c Claim) time.Duration { return l.At.Sub(time.UnixMicro(c.Token)) }

// List returns the claims of all sessions on keys of some kinds, as of one moment: one
// statement. Those of sessions that are gone are not listed. A process that has crashed is
// listed until its session has expired and was buried. It is meant for kinds of some thousand
// keys. This process need not have a session.
func (s *Session) List(ctx context.Context, kinds ...string) (Listing, error) {
	listing, err := s.list(ctx, kinds)
	if err != nil {
		return Listing{}, fmt.Errorf("tenure: list claims of %s: %w", strings.Join(kinds, ", "), err)
	}
	return listing, nil
}

func (s *Session) list(ctx context.Context, kinds []string) (Listing, error) {
	if len(kinds) == 0 || slices.Contains(kinds, "") {
		return Listing{}, fmt.Errorf("%w: a kind is missing", tenure.ErrInvalid)
	}
	for _, kind := range kinds {
		if err := objects.ValidText("kind", kind); err != nil {
			return Listing{}, err
		}
	}
	rows, at, err := s.table.OfKinds(ctx, kinds, s.limit)
	if err != nil {
		return Listing{}, err
	}
	listing := Listing{Claims: make([]Claim, 0, len(rows)), At: at}
	for _, r := range rows {
		listing.Claims = append(listing.Claims, Claim{Key: tenure.Key{Type: r.Kind, ID: r.ID}, Session: r.Session, Token: r.Token})
	}
	return listing, nil
}

// Config returns the session's config, with its defaults.
func (s *Session) Config() SessionConfig {
	cfg := s.cfg
	cfg.Labels, cfg.Logger = maps.Clone(cfg.Labels), report.Original(cfg.Logger)
	return cfg
}

// Watch subscribes to the keys of this kind: it receives when some were freed, and when
// [Keys.Wake] was called. Until it is stopped, the session looks for others as soon as one of
// them can expire, as it does during [Keys.Wait]. It does no I/O.
func (k *Keys) Watch() tenure.Subscription {
	return &watch{Subscription: k.s.hints(keyOf(k.kind)), done: sync.OnceFunc(k.s.sweeper.waits())}
}

type watch struct {
	tenure.Subscription
	done func()
}

func (w *watch) Stop() {
	w.Subscription.Stop()
	w.done()
}

// Wake wakes those that watch or wait for keys of this kind, in other processes too. Errors
// don't matter: a hint may be lost in any case.
func (k *Keys) Wake() { k.s.hint(keyOf(k.kind)) }

// Forget deletes the rows of keys of this kind that are free, which would be deleted a day after
// their last claim anyway. It is for keys that are never claimed again, so that no token can repeat.
func (k *Keys) Forget(ctx context.Context) error {
	if err := k.s.table.Forget(ctx, k.kind, k.s.limit); err != nil {
		return fmt.Errorf("tenure: forget %s: %w", k.kind, err)
	}
	return nil
}
