package etcdtenure

import (
	"bytes"
	"cmp"
	"context"
	crand "crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// errOvertaken says that a condition of a transaction did not hold. Nothing was written.
var errOvertaken = errors.New("another write came first")

const longestPause = 8 * time.Millisecond

// requiringLeader makes a server that sees no leader refuse a request at once, instead of keeping
// it waiting.
//
// It also hides the deadline from the client, which would pass it on to the server: after the
// server's own DeadlineExceeded the client sends a transaction again, and if the first one was
// executed, the second looks as if another write had come first.
func requiringLeader(ctx context.Context) context.Context {
	return clientv3.WithRequireLeader(withoutDeadline{ctx})
}

// withoutDeadline is still done when the deadline has passed.
type withoutDeadline struct{ context.Context }

func (withoutDeadline) Deadline() (deadline time.Time, ok bool) { return time.Time{}, false }

// request is a transaction. Its conditions also have that the epoch is still this one.
type request struct {
	epoch           epoch
	conditions      []clientv3.Cmp
	then, otherwise []clientv3.Op
}

// keys returns the keys that are compared or written, except that of the epoch.
func (r request) keys() (keys []string) {
	for _, c := range r.conditions {
		keys = append(keys, string(c.KeyBytes()))
	}
	for _, op := range r.then {
		keys = append(keys, string(op.KeyBytes()))
	}
	return keys
}

// look reads at one revision.
func (s *Store) look(ctx context.Context, reads ...clientv3.Op) (epoch, *clientv3.TxnResponse, error) {
	for {
		e, err := s.ready(ctx)
		if err != nil {
			return e, nil, err
		}
		resp, err := s.ask(ctx, request{epoch: e, then: reads})
		if !errors.Is(err, errOvertaken) {
			return e, resp, err
		}
	}
}

// ask sends a request, again if it was refused for now.
func (s *Store) ask(ctx context.Context, r request) (*clientv3.TxnResponse, error) {
	reads := !slices.ContainsFunc(r.then, func(op clientv3.Op) bool { return !op.IsGet() })
	for {
		resp, err := s.try(ctx, r)
		if err == nil {
			return resp, nil
		}
		if ctx.Err() != nil || !again(err, reads) {
			return nil, s.why(ctx, err)
		}
		if ended := storekit.Pause(ctx, longestPause); ended != nil {
			return nil, fmt.Errorf("%w: %w", ended, err)
		}
	}
}

// try sends a request once. If the epoch is another one, the error is errOvertaken.
func (s *Store) try(ctx context.Context, r request) (*clientv3.TxnResponse, error) {
	key := s.cfg.Prefix + ofEpoch
	conditions := append(r.conditions, clientv3.Compare(clientv3.Value(key), "=", r.epoch.text))
	otherwise := append(r.otherwise, clientv3.OpGet(key))
	s.mu.Lock()
	newest := s.newest
	s.mu.Unlock()
	s.connectNow()
	resp, err := s.client.Txn(requiringLeader(ctx)).If(conditions...).Then(r.then...).Else(otherwise...).Commit()
	if err != nil {
		return nil, err
	}
	if err := s.follows(r.epoch, newest, resp.Header); err != nil {
		return nil, err
	}
	if !resp.Succeeded {
		is := resp.Responses[len(resp.Responses)-1].GetResponseRange().Kvs
		if len(is) == 0 || string(is[0].Value) != r.epoch.text {
			s.overtaken(r.epoch)
			return nil, errOvertaken
		}
	}
	return resp, nil
}

// connectNow makes a client that has no connection try to connect at once. By itself the client
// waits longer after each failure, in the end for two minutes, during which no replica would hold a
// lease although the servers are back.
func (s *shared) connectNow() {
	const least = 500 * time.Millisecond // between two attempts
	conn := s.client.ActiveConnection()
	if conn == nil || conn.GetState() != connectivity.TransientFailure {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.connects) >= least {
		s.connects = time.Now()
		conn.ResetConnectBackoff()
	}
}

// why explains an error. If a request got no connection in time, the client does not say why there is
// none.
func (s *shared) why(ctx context.Context, err error) error {
	if s.client.Ctx().Err() != nil {
		return fmt.Errorf("%w: the client of etcd was closed: %w", tenure.ErrClosed, err)
	}
	conn := s.client.ActiveConnection()
	if ctx.Err() == nil || conn == nil || conn.GetState() != connectivity.TransientFailure {
		return explained(err)
	}
	return withReason(ctx, conn, err)
}

// withReason adds to an error why no connection can be made, if none can.
func withReason(ctx context.Context, conn grpc.ClientConnInterface, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 100*time.Millisecond)
	defer cancel()
	_, reason := etcdserverpb.NewMaintenanceClient(conn).Status(ctx, new(etcdserverpb.StatusRequest), grpc.WaitForReady(false))
	if code(reason) != codes.Unavailable {
		return explained(err)
	}
	return fmt.Errorf("%w: %w", err, reason)
}

// again reports whether a request had no effect but may succeed soon.
func again(err error, reads bool) bool {
	return errors.Is(err, rpctypes.ErrNoLeader) || errors.Is(err, rpctypes.ErrTooManyRequests) || reads && code(err) == codes.Unavailable
}

func code(err error) codes.Code {
	var known rpctypes.EtcdError
	if errors.As(err, &known) {
		return known.Code()
	}
	return status.Code(err)
}

// explained says what to do about an error of etcd.
func explained(err error) error {
	switch {
	case errors.Is(err, rpctypes.ErrPermissionDenied), errors.Is(err, rpctypes.ErrUserEmpty), errors.Is(err, rpctypes.ErrAuthFailed):
		return fmt.Errorf("%w: the client's user needs a role that may read and write the prefix (%w)", tenure.ErrSetup, err)
	case errors.Is(err, rpctypes.ErrNoSpace):
		return fmt.Errorf("%w: compact and defragment etcd, and disarm its alarm (%w)", tenure.ErrSetup, err)
	case errors.Is(err, rpctypes.ErrRequestTooLarge), code(err) == codes.ResourceExhausted && !errors.Is(err, rpctypes.ErrTooManyRequests):
		return fmt.Errorf("%w: the object is too large for etcd's max-request-bytes or the client's MaxCallSendMsgSize (%w)", tenure.ErrInvalid, err)
	}
	return err
}

// PutIf writes the object if the condition holds. An object larger than the server's
// max-request-bytes allows is [tenure.ErrInvalid].
func (s *Store) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (written tenure.Object, err error) {
	defer storekit.OpError(ctx, &err, "etcdtenure: put", obj.Key)
	if err := cmp.Or(obj.Validate(), cond.Validate(), storekit.CheckFenced(s.term, obj.Key), ctx.Err()); err != nil {
		return tenure.Object{}, err
	}
	var m meta
	payload := bytes.Clone(obj.Payload)
	e, revision, err := s.write(ctx, obj.Key, obj.Name, func(version int64) error { return cond.Check(obj.Key, version) }, func(before state) []clientv3.Op {
		now := time.Now().UnixMicro()
		m = meta{Type: obj.Key.Type, ID: obj.Key.ID, Name: obj.Name, Labels: obj.Labels, Created: now, Updated: now, Write: crand.Text()}
		if before.revision != 0 {
			m.Created, m.Updated = cmp.Or(before.Created, now), max(now, before.Updated)
		}
		ops := []clientv3.Op{clientv3.OpPut(s.keyOf(ofObjects, obj.Key), m.encode(payload))}
		if before.revision == 0 || before.payload != sha256.Sum256(payload) {
			ops = append(ops, clientv3.OpPut(s.keyOf(ofTerms, obj.Key), hashOf(payload)))
		}
		return ops
	})
	if err != nil {
		return tenure.Object{}, err
	}
	m.Labels = maps.Clone(m.Labels)
	s.saw(e, obj.Key, state{revision: revision, meta: m, payload: sha256.Sum256(payload)}, revision)
	return tenure.Object{
		Key: obj.Key, Name: m.Name, Labels: maps.Clone(m.Labels), Payload: payload, Version: e.version(revision),
		CreatedAt: stamp(m.Created), UpdatedAt: stamp(m.Updated),
	}, nil
}

// DeleteIf deletes the object if it is at that version. Nothing remains of it.
func (s *Store) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) (err error) {
	defer storekit.OpError(ctx, &err, "etcdtenure: delete", key)
	if err := cmp.Or(key.Validate(), cond.ValidateDelete(), storekit.CheckFenced(s.term, key), ctx.Err()); err != nil {
		return err
	}
	e, revision, err := s.write(ctx, key, "", func(is int64) error {
		if is == 0 {
			return tenure.ErrNotFound
		}
		return cond.Check(key, is)
	}, func(state) []clientv3.Op {
		return []clientv3.Op{clientv3.OpDelete(s.keyOf(ofObjects, key)), clientv3.OpDelete(s.keyOf(ofTerms, key))}
	})
	if err == nil {
		s.saw(e, key, state{}, revision)
	}
	return err
}

// claim names the object that has a name.
type claim struct {
	revision int64 // of the claim; 0 if no object has the name
	owner    tenure.Key
	of       int64 // the revision of the owner, which has a different name by now; 0 if there is no owner
}

// write replaces the keys of an object, if check allows it, with what make makes of the present
// state, and gives it the name. It returns the revision. If this process knows the object, it does
// not read first, because the server compares.
func (s *Store) write(ctx context.Context, key tenure.Key, name string, check func(version int64) error, make func(before state) []clientv3.Op) (epoch, int64, error) {
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	var had claim
	for tries := 0; ; tries++ {
		e, err := s.ready(ctx)
		if err != nil {
			return e, 0, err
		}
		before := s.recall(e, key)
		if check(before.version(e)) != nil {
			if before, _, _, err = s.read(ctx, key); err != nil {
				return e, 0, err
			}
			if e, err = s.ready(ctx); err != nil {
				return e, 0, err
			}
			if err := check(before.version(e)); err != nil {
				return e, 0, s.lostOr(ctx, err)
			}
		}
		object := s.keyOf(ofObjects, key)
		conditions := []clientv3.Cmp{at(object, before.revision)}
		reads := []clientv3.Op{clientv3.OpGet(object)}
		ops := make(before)
		if s.term != nil {
			conditions = append(conditions, s.current(e, s.term)...)
		}
		claims := name != "" && (before.revision == 0 || before.Name != name)
		if claims {
			of := s.keyOf(ofNames, tenure.Key{Type: key.Type, ID: name})
			conditions = append(conditions, at(of, had.revision))
			if had.revision != 0 && had.owner != key {
				conditions = append(conditions, at(s.keyOf(ofObjects, had.owner), had.of))
			}
			reads = append(reads, clientv3.OpGet(of))
			ops = append(ops, clientv3.OpPut(of, key.ID))
		}
		if before.revision != 0 && before.Name != "" && before.Name != name {
			ops = append(ops, clientv3.OpDelete(s.keyOf(ofNames, tenure.Key{Type: key.Type, ID: before.Name})))
		}
		resp, err := s.send(ctx, request{e, conditions, ops, reads})
		switch {
		case err == nil && resp.Succeeded:
			return e, resp.Header.Revision, nil
		case err != nil && !errors.Is(err, errOvertaken):
			s.forget(key)
			return e, 0, err
		case err == nil:
			var is state
			if kvs := resp.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
				// The client sends a request again by itself after some errors of a proxy, although
				// the first may have been executed.
				if ops[0].IsPut() && bytes.Equal(kvs[0].Value, ops[0].ValueBytes()) {
					return e, kvs[0].ModRevision, nil
				}
				is, _ = decode(e, key, kvs[0])
			}
			s.saw(e, key, is, resp.Header.Revision)
			if err := s.lostOr(ctx, check(is.version(e))); err != nil {
				return e, 0, err
			}
			if claims {
				if had, err = s.claim(ctx, key, name, resp.Responses[1].GetResponseRange()); err != nil {
					return e, 0, s.lostOr(ctx, err)
				}
			}
		}
		if err := storekit.Pause(ctx, min(time.Millisecond<<min(tries, 4), longestPause)); tries > 0 && err != nil {
			return e, 0, fmt.Errorf("%w: %w", err, errOvertaken)
		}
	}
}

// at compares the revision of a key, which is 0 if the key does not exist.
func at(key string, revision int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.ModRevision(key), "=", revision)
}

// claim returns the claim to a name that was found. An existing object with that name owns it. An
// object that was renamed, or removed by hand, leaves only the claim.
func (s *Store) claim(ctx context.Context, key tenure.Key, name string, found *etcdserverpb.RangeResponse) (claim, error) {
	if len(found.Kvs) == 0 {
		return claim{}, nil
	}
	c := claim{revision: found.Kvs[0].ModRevision, owner: tenure.Key{Type: key.Type, ID: string(found.Kvs[0].Value)}}
	if c.owner == key {
		return c, nil
	}
	is, _, _, err := s.read(ctx, c.owner) // after the claim, so that it cannot have claimed the name since
	if err == nil && is.revision != 0 && is.Name == name {
		err = fmt.Errorf("%w: name %q is %s's", tenure.ErrTaken, name, c.owner)
	}
	c.of = is.revision
	return c, err
}

// Fence returns the store with its writes fenced by a term: each one is a transaction with the
// condition that the key which is written when a term begins or ends has not changed since this
// term began. Fence does no I/O.
func (s *Store) Fence(guard tenure.Guard) (tenure.Store, error) {
	term, err := storekit.FenceTerm(s.term, guard)
	if err != nil {
		return nil, fmt.Errorf("etcdtenure: fence: %w", err)
	}
	if term == nil {
		return s, nil
	}
	return &Store{shared: s.shared, term: term}, nil
}

// FenceConditions returns conditions that fence the caller's own transaction, on the store's
// cluster, by the term. If they do not hold, the term is over, and [tenure.Lease.Renew] returns
// [tenure.ErrLost] too. A term of a single replica, which has no lease to lose, needs no
// conditions, and gets none.
//
//	conditions, err := store.FenceConditions(ctx, term)
//	resp, err := client.Txn(ctx).If(conditions...).Then(clientv3.OpPut("mine", "x")).Commit()
func (s *Store) FenceConditions(ctx context.Context, term *tenure.Term) (conditions []clientv3.Cmp, err error) {
	if term, err = storekit.FenceTerm(nil, term); err != nil {
		return nil, fmt.Errorf("etcdtenure: fence conditions: %w", err)
	}
	if term == nil {
		return nil, nil
	}
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	defer storekit.OpError(ctx, &err, "etcdtenure: fence conditions", term.Key())
	e, err := s.ready(ctx)
	if err != nil {
		return nil, err
	}
	return append(s.current(e, term), clientv3.Compare(clientv3.Value(s.cfg.Prefix+ofEpoch), "=", e.text)), nil
}

// current returns the conditions that a term is not over. The revision alone does not show that:
// after a restore another term may have got the same one.
func (s *shared) current(e epoch, term *tenure.Term) []clientv3.Cmp {
	of := s.keyOf(ofTerms, term.Key())
	return []clientv3.Cmp{at(of, term.Token()-e.Above), clientv3.Compare(clientv3.Value(of), "=", hashOf(term.Record()))}
}

// hashOf returns what is written beside a term's record when the term begins.
func hashOf(payload []byte) string {
	hash := sha256.Sum256(payload)
	return string(hash[:])
}

// lostOr returns the error of a refused write, unless the fence does not hold either, which takes
// precedence.
func (s *Store) lostOr(ctx context.Context, refusal error) error {
	if s.term == nil || !(refusal == nil || storekit.Refusal(refusal)) {
		return refusal
	}
	e, resp, err := s.look(ctx, clientv3.OpGet(s.keyOf(ofTerms, s.term.Key())))
	if err != nil {
		return err
	}
	if kvs := resp.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 && e.version(kvs[0].ModRevision) == s.term.Token() && string(kvs[0].Value) == hashOf(s.term.Record()) {
		return refusal
	}
	return storekit.LostTo(ctx, s, s.term)
}
