package tenure

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/google/uuid"
)

// requestLabel is the label of a lease's object by which its holder is asked to
// release it. It lasts until the next renewal.
const requestLabel = reservedLabels + "release"

// releaseRequest is what stands in that label. To write it makes a new version of
// the object, at a new time; but a request is no renewal, and must not make the
// lease of a holder that has vanished last longer. So it says what was there
// before, and readers go by that.
type releaseRequest struct {
	Term        string `json:"term"`          // that is asked; another program leaves the label in its own record
	To          string `json:"to,omitempty"`  // the replica that is to be next; empty: any
	Version     int64  `json:"version"`       // of the last renewal
	RenewedAtMS int64  `json:"renewed_at_ms"` // by the store's clock
}

// requestIn returns the request that stands in an object, or nil.
func requestIn(obj Object) *releaseRequest {
	var r releaseRequest
	if !reserved(obj, requestLabel, &r) || !isTermOf(r.Term, obj) || r.Version <= 0 || r.Version >= obj.Version {
		return nil
	}
	return &r
}

// cause is why the term ends whose holder obeys.
func (r *releaseRequest) cause() error {
	if r.To == "" {
		return fmt.Errorf("%w: on request", ErrResigned)
	}
	return fmt.Errorf("%w: on request, in favour of %s", ErrResigned, r.To)
}

// asRenewed returns an object as its last renewal has left it.
func asRenewed(obj Object) Object {
	request := requestIn(obj)
	if request == nil {
		return obj
	}
	renewed := time.UnixMilli(request.RenewedAtMS)
	obj.Age += obj.UpdatedAt.Truncate(time.Millisecond).Sub(renewed)
	obj.Version, obj.UpdatedAt = request.Version, renewed
	return obj
}

// wholeMilli is a time as requests tell it, not before it.
func wholeMilli(t time.Time) int64 { return t.Add(time.Millisecond - 1).UnixMilli() }

// RequestRelease asks the holder, through the store, to give the lease up: as
// [Coordinator.Resign] would in its process. It returns when the request is
// stored. The holder's coordinator obeys as soon as it is woken, or at its next
// renewal. A holder that has vanished doesn't, and its lease expires as it would
// have without the request; nor does one that has no [Coordinator]. [ErrNotFound]
// says that nobody holds the lease, [errors.ErrUnsupported] that its record was
// written by another program.
//
// Any process may ask that can write to the store; its Lease need not compete.
func (l *Lease) RequestRelease(ctx context.Context) error { return l.RequestHandover(ctx, "") }

// RequestHandover is [Lease.RequestRelease], and names the replica, by its Holder,
// that shall be next. For a time it alone may begin a term, then any: for 5/4 of the
// old holder's AcquireInterval, a second at least, the TTL at most. It returns nil
// where that replica holds the lease already. A later request replaces an earlier
// one that was not obeyed yet.
func (l *Lease) RequestHandover(ctx context.Context, to string) error {
	if err := cmp.Or(validText("replica", to), validHolder(to)); err != nil {
		return fmt.Errorf("tenure: request release of %s: %w", l.cfg.Key, err)
	}
	var err error
	for range 5 { // renewals come in between
		if err = l.request(ctx, to); !errors.Is(err, ErrConflict) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("tenure: request release: %w", err)
	}
	return nil
}

// request writes a request into the record as it stands.
func (l *Lease) request(ctx context.Context, to string) error {
	obj, err := l.look(ctx)
	if err != nil {
		return err
	}
	holding, stands := l.decode(obj), requestIn(obj)
	switch {
	case holding.Offered:
		return fmt.Errorf("%s is %s: %w", l.cfg.Key, holding.how(), ErrNotFound)
	case to != "" && holding.Holder == to && stands == nil:
		return nil
	case holding.Term == "":
		return fmt.Errorf("%s is held by a program that cannot be asked: %w", l.cfg.Key, errors.ErrUnsupported)
	}
	if stands == nil || stands.To != to {
		before := asRenewed(obj)
		obj.Labels = withReserved(obj.Labels, requestLabel, releaseRequest{
			Term: holding.Term, To: to, Version: before.Version, RenewedAtMS: wholeMilli(before.UpdatedAt),
		})
		if _, err := l.store.PutIf(leaseCall(ctx), obj, MatchVersion(obj.Version)); err != nil {
			return err
		}
	}
	wakeAll(ctx, l.store, l.cfg.Key) // where that fails, it is found at the next renewal
	return nil
}

// leftTo makes the record that a holder leaves behind who leaves the lease to one
// replica: for so long no other takes it. No replica named, any may take it at once.
func leftTo(replica string, lasts time.Duration) *record {
	return &record{
		Holder:       replica,
		AcquiredAtMS: time.Now().UnixMilli(),
		Term:         uuid.NewString(),
		TTLMS:        max(1, lasts.Milliseconds()),
		Offered:      true,
	}
}

// reservedLabels begins the names of labels that only leases write.
const reservedLabels = "tenure."

func hasReserved(obj Object) bool {
	for name := range obj.Labels {
		if strings.HasPrefix(name, reservedLabels) {
			return true
		}
	}
	return false
}

// reserved reads one of those labels. It returns false where there is none that
// can be read.
func reserved(obj Object, label string, value any) bool {
	text, ok := obj.Labels[label]
	return ok && json.Unmarshal([]byte(text), value) == nil
}

// withReserved returns labels with one of those.
func withReserved(labels map[string]string, label string, value any) map[string]string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(fmt.Sprintf("bug: a label of strings and numbers does not encode: %v", err))
	}
	labels = maps.Clone(labels)
	if labels == nil {
		labels = make(map[string]string, 1)
	}
	labels[label] = string(text)
	return labels
}
