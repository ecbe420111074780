package kubetenure

import (
	"bytes"
	"cmp"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// PutIf writes the object if the condition holds. All annotations of a Lease, the payload among them,
// are limited to 256 KiB together; a payload that is not UTF-8 takes a third more. A larger object is
// [tenure.ErrInvalid], and one with a name [errors.ErrUnsupported].
func (s *Store) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (written tenure.Object, err error) {
	defer storekit.OpError(ctx, &err, "kubetenure: put", obj.Key)
	if err := cmp.Or(obj.Validate(), cond.Validate()); err != nil {
		return tenure.Object{}, err
	}
	if obj.Name != "" {
		return tenure.Object{}, fmt.Errorf("%w: the store keeps no names", errors.ErrUnsupported)
	}
	o := object{Type: obj.Key.Type, ID: obj.Key.ID, Labels: obj.Labels}
	is, err := s.write(ctx, obj.Key, o, obj.Payload, func(version int64) error { return cond.Check(obj.Key, version) })
	if err != nil {
		return tenure.Object{}, err
	}
	return tenure.Object{
		Key: obj.Key, Labels: maps.Clone(obj.Labels), Payload: bytes.Clone(obj.Payload), Version: is.at,
		CreatedAt: stamp(is.Created), UpdatedAt: stamp(is.Updated),
	}, nil
}

// DeleteIf deletes the object if it has the given version. The Lease itself remains, without a holder.
func (s *Store) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) (err error) {
	defer storekit.OpError(ctx, &err, "kubetenure: delete", key)
	if err := cmp.Or(key.Validate(), cond.ValidateDelete()); err != nil {
		return err
	}
	_, err = s.write(ctx, key, object{Type: key.Type, ID: key.ID, Deleted: true}, nil, func(is int64) error {
		if is == 0 {
			return tenure.ErrNotFound
		}
		return cond.Check(key, is)
	})
	return err
}

// write replaces the object in a Lease if check allows it. If this process knows the Lease, it writes
// without a read first: the API server compares the versions.
func (s *Store) write(ctx context.Context, key tenure.Key, o object, payload []byte, check func(version int64) error) (*state, error) {
	const longestPause = 8 * time.Millisecond
	ctx, cancel, err := s.begin(ctx)
	defer cancel()
	if err != nil {
		return nil, err
	}
	o.Write = crand.Text()
	for tries := 0; ; tries++ {
		had := s.recall(key)
		if had == nil || had.doubted || check(had.version()) != nil {
			is, err := s.read(ctx, key)
			if err != nil {
				return nil, err
			}
			// The answer may have been lost, and a proxy may have sent the write again.
			if tries > 0 && is.object.Write == o.Write {
				return is, nil
			}
			if err := check(is.version()); err != nil {
				return nil, err
			}
			had = &known{state: is}
		}
		is, err := s.put(ctx, key, had.state, o, payload)
		if err == nil || !errors.Is(err, errOvertaken) {
			return is, err
		}
		if tries > 0 { // the first time, the known state may just have been out of date
			if ended := storekit.Pause(ctx, min(time.Millisecond<<min(tries, 4), longestPause)); ended != nil {
				return nil, fmt.Errorf("%w: %w", ended, err)
			}
		}
	}
}

// errOvertaken reports that the Lease was no longer in the state that a write was to replace. Nothing
// was written.
var errOvertaken = errors.New("another write came first")

// put sends a write that replaces a state. A PUT without a resourceVersion creates the Lease. Unlike a
// POST, it has the name in the URL, so a Role can allow it for one Lease only. It has the uid, because
// otherwise a PUT for a Lease that was deleted in the meantime would create it again.
func (s *Store) put(ctx context.Context, key tenure.Key, before *state, o object, payload []byte) (*state, error) {
	now := time.Now()
	o.Updated = max(now.UnixMicro(), before.Updated)
	o.Created = o.Updated
	if before.version() != 0 {
		o.Created = cmp.Or(before.Created, o.Updated)
	}
	spec := specFor(payload, before.Spec, now)
	if o.Deleted {
		spec = released(before.Spec, now)
	}
	l := before.encode(s.name(key), s.cfg.Namespace, o, payload, spec)
	creates := before.at == 0
	var got lease
	err := s.client.send(ctx, http.MethodPut, l.Metadata.Name, nil, &l, &got)
	if err != nil {
		s.doubt(key)
	}
	switch {
	case is(err, http.StatusConflict), is404(err):
		return nil, errOvertaken
	case creates && is(err, http.StatusUnprocessableEntity): // the answer if the Lease exists
		if is, failed := s.read(ctx, key); failed != nil || is.at != 0 {
			return nil, cmp.Or(failed, errOvertaken)
		}
		return nil, err
	case err != nil:
		return nil, err
	case !l.isKeptBy(got):
		s.doubt(key)
		return nil, errChanged
	}
	after, err := decode(key, got)
	if err != nil {
		return nil, err
	}
	if after.at == before.at {
		s.doubt(key)
		return nil, errors.New("the API server has answered without a write")
	}
	s.saw(key, nil, after)
	return after, nil
}
