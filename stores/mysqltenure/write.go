package mysqltenure

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// The greatest lengths of what is in an index, in bytes.
const (
	longestType = 255
	longestText = 1024 // of an ID or a name
)

// overhead is more than a statement has besides what it writes.
const overhead = 8 << 10

// checkLengths returns [tenure.ErrInvalid] for what is longer than its column, or than the server's max_allowed_packet.
func (s *shared) checkLengths(obj tenure.Object) error {
	if len(obj.Key.Type) > longestType || len(obj.Key.ID) > longestText || len(obj.Name) > longestText {
		return fmt.Errorf("%w: a type has at most %d bytes, an ID or a name %d", tenure.ErrInvalid, longestType, longestText)
	}
	length := len(obj.Payload)
	for label, text := range obj.Labels {
		length += len(label) + len(text)
	}
	if most := s.server.packet() - overhead; most > 0 && length > most {
		return fmt.Errorf("%w: payload and labels have %d bytes, and the server's max_allowed_packet leaves room for %d", tenure.ErrInvalid, length, most)
	}
	return nil
}

// content returns the arguments of a statement for what a caller writes of an object. A payload is never nil, since
// that means that there is no object.
func content(obj tenure.Object) []any {
	var name []byte // nil: NULL, so that any number of objects have none
	if obj.Name != "" {
		name = []byte(obj.Name)
	}
	labels, err := json.Marshal(obj.Labels)
	if err != nil {
		panic(err) // it has only text
	}
	return []any{name, labels, append([]byte{}, obj.Payload...)}
}

// PutIf writes the object if the condition holds. A type of more than 255 bytes, an ID or a name of more than
// 1024, and an object that is larger than the server's max_allowed_packet are [tenure.ErrInvalid].
func (s *Store) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (written tenure.Object, err error) {
	defer storekit.OpError(ctx, &err, "mysqltenure: put", obj.Key)
	err = cmp.Or(obj.Validate(), cond.Validate(), storekit.CheckFenced(s.term, obj.Key), ctx.Err(), s.checkLengths(obj))
	if err != nil {
		return tenure.Object{}, err
	}
	obj.Labels, obj.Payload = maps.Clone(obj.Labels), bytes.Clone(obj.Payload)
	var is state
	err = s.write(ctx, func(ctx context.Context, on querier) (err error) {
		is, err = s.put(ctx, on, obj, cond)
		return err
	})
	if err != nil {
		return tenure.Object{}, err
	}
	s.saw(obj.Key, is)
	s.bells.wrote(obj.Key, s.bells.name(obj.Key, obj.Payload))
	obj.Version, obj.Age = is.version, 0
	obj.CreatedAt, obj.UpdatedAt = time.UnixMicro(is.created).UTC(), time.UnixMicro(is.version).UTC()
	return obj, nil
}

// put writes an object, and returns its state.
func (s *Store) put(ctx context.Context, on querier, obj tenure.Object, cond tenure.WriteCondition) (state, error) {
	check := func(version int64) error { return cond.Check(obj.Key, version) }
	args := append(content(obj), []byte(obj.Key.Type), []byte(obj.Key.ID))
	return s.change(ctx, on, obj.Key, check, func(from state) (state, error) {
		statement, args := s.sql.revive, args
		switch {
		case s.inOne(on) && from.version == 0:
			return state{}, errInTx
		case s.inOne(on):
			statement, args = s.sql.fencedReplace, append(append(fenceArgs(s.term), args...), from.version)
		case from.version != 0:
			statement, args = s.sql.replace, append(args[:len(args):len(args)], from.version)
		case from.noRow:
			statement = s.sql.insert
		}
		done, err := on.ExecContext(ctx, statement, args...)
		if number(err) == errDuplicate {
			return state{}, s.duplicate(ctx, on, obj.Key, from, err)
		} else if err != nil {
			return state{}, err
		}
		version, err := done.LastInsertId()
		if err == nil && version == 0 {
			err = s.overtaken(on)
		}
		to := state{version: version, created: version}
		if from.version != 0 {
			to.created = from.created
		}
		return to, err
	})
}

// duplicate returns what has made a write fail: another object of its name, or, if it was to insert the key's first row, a
// writer that was faster. The server's text, which says which, is in its language.
func (s *Store) duplicate(ctx context.Context, on querier, key tenure.Key, from state, err error) error {
	if from.noRow {
		if is, err := s.read(ctx, on, key); err != nil || !is.noRow {
			return cmp.Or(err, errOvertaken)
		}
	}
	return fmt.Errorf("%w: the name is another object's (%w)", tenure.ErrTaken, err)
}

// DeleteIf deletes the object if it is at that version, and wakes all watches of it. A row with its version
// remains.
func (s *Store) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) (err error) {
	defer storekit.OpError(ctx, &err, "mysqltenure: delete", key)
	if err := cmp.Or(key.Validate(), cond.ValidateDelete(), storekit.CheckFenced(s.term, key), ctx.Err(), s.checkLengths(tenure.Object{Key: key})); err != nil {
		return err
	}
	err = s.write(ctx, func(ctx context.Context, on querier) error { return s.remove(ctx, on, key, cond) })
	if err == nil {
		s.saw(key, state{})
		s.bells.wrote(key, "")
	}
	return err
}

func (s *Store) remove(ctx context.Context, on querier, key tenure.Key, cond tenure.WriteCondition) error {
	check := func(version int64) error {
		if version == 0 {
			return tenure.ErrNotFound
		}
		return cond.Check(key, version)
	}
	_, err := s.change(ctx, on, key, check, func(from state) (state, error) {
		statement, args := s.sql.remove, []any{[]byte(key.Type), []byte(key.ID), from.version}
		if s.inOne(on) {
			statement, args = s.sql.fencedRemove, append(fenceArgs(s.term), args...)
		}
		done, err := on.ExecContext(ctx, statement, args...)
		if err != nil {
			return state{}, err
		}
		n, err := done.RowsAffected()
		if err == nil && n == 0 {
			err = s.overtaken(on)
		}
		return state{}, err
	})
	return err
}

// change calls write with a state that check accepts: first the one that this process remembers, and once that
// was overtaken the one that it reads. A write is conditional on the state that it is given, and otherwise
// returns errOvertaken.
func (s *Store) change(ctx context.Context, on querier, key tenure.Key, check func(version int64) error, write func(from state) (state, error)) (state, error) {
	from, isRead := s.recall(key), false
	for {
		if !isRead && check(from.version) != nil {
			from, isRead = state{}, true // as if it were overtaken
		} else if is, err := write(from); !errors.Is(err, errOvertaken) {
			return is, err
		} else if isRead { // by a writer that is faster, or the read has reached a replica that lags
			if err := storekit.Pause(ctx, longestPause); err != nil {
				return state{}, fmt.Errorf("%w: %w", err, errOvertaken)
			}
		}
		var err error
		if from, err = s.read(ctx, on, key); err != nil {
			return state{}, err
		}
		isRead = true
		s.saw(key, from)
		if err := check(from.version); err != nil {
			return state{}, err
		}
	}
}

// write calls do with the pool, where each statement is a transaction of its own, or, if the store is fenced and that does
// not suffice, within a transaction that ends with the fence.
func (s *Store) write(ctx context.Context, do func(ctx context.Context, on querier) error) error {
	ctx, cancel := storekit.WithLimit(ctx, requestTimeout)
	defer cancel()
	return again(ctx, func() error {
		err := do(ctx, s.pools.calls)
		if s.term == nil || err == nil || !storekit.Refusal(err) && !errors.Is(err, errInTx) {
			return err
		}
		return s.fenced(ctx, do)
	})
}

// errInTx says that one statement can't both make a fenced write and tell why it did not.
var errInTx = errors.New("a transaction is needed")

// inOne reports whether a write has to be fenced by its statement, because there is no transaction.
func (s *Store) inOne(on querier) bool { return s.term != nil && on == querier(s.pools.calls) }

// overtaken returns the error of a statement that has found no row to write.
func (s *Store) overtaken(on querier) error {
	if s.inOne(on) { // or the term is over
		return errInTx
	}
	return errOvertaken
}

// fenced calls do within a transaction that is committed only if the store's term stands. A loss takes
// precedence over what do says.
func (s *Store) fenced(ctx context.Context, do func(ctx context.Context, on querier) error) error {
	tx, err := s.pools.calls.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted}) // to read what others have committed
	if err != nil {
		return err
	}
	defer tx.Rollback()
	refusal := do(ctx, tx)
	if refusal != nil && !storekit.Refusal(refusal) {
		return refusal
	}
	if _, err := tx.ExecContext(ctx, s.sql.fence, fenceArgs(s.term)...); isFenceFailure(err) {
		_ = tx.Rollback() // before more is read
		return storekit.LostTo(ctx, &Store{shared: s.shared}, s.term)
	} else if err != nil {
		return err
	}
	if refusal != nil {
		return refusal
	}
	return tx.Commit()
}
