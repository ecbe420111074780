package natstenure

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

// message is one message of a write. It is stored only if the last sequence of the subject
// expectOf is the expected one.
type message struct {
	subject  string
	data     []byte
	expectOf string
	expect   uint64
}

// errOvertaken says that an expectation did not hold. Nothing was written.
var errOvertaken = errors.New("another write came first")

// Errors of JetStream. They mean that the message was not stored.
const (
	wrongSequence     = 10071
	writeInFlight     = 10158 // the same message, sent before, has not been decided yet
	subjectInFlight   = 10164 // another write of the subject has not been decided yet
	incompleteBatch   = 10176 // the first messages of the batch got lost
	tooManyBatches    = 10210
	accountFull       = 10002
	serverFull        = 10023
	storageFull       = 10047
	storeFailed       = 10077 // for the reason in its description
	longestPause      = 8 * time.Millisecond
	patience          = 5 // how often a write waits for another write that has claimed its name
	staleAnswers      = 5 // after this many in a row, the stream must have been set back
	roomForHeaders    = 1 << 10
	headerBatch       = "Nats-Batch-Id"
	headerBatchNumber = "Nats-Batch-Sequence"
	headerBatchCommit = "Nats-Batch-Commit"
)

// publish stores all messages, or none, and returns the sequence of the last one. It sends them as
// one write with that ID. In a bucket it stores one after the other, and stops at the first that is
// refused; the object's message is the last.
//
// A former leader of the stream that was cut off and is back may still answer requests, as the new
// leader does. It may refuse a message that the new leader has stored. Its answer then has an older
// sequence than expected, so publish sends the message again, and the server that has stored a
// single message recognises it by its ID.
func (s *Store) publish(ctx context.Context, id string, messages ...message) (uint64, error) {
	stream, err := s.ready(ctx)
	if err != nil {
		return 0, err
	}
	most, limit := s.nc.MaxPayload()-roomForHeaders, "its max_payload"
	if size := int64(stream.CachedInfo().Config.MaxMsgSize) - roomForHeaders; s.cfg.Bucket != "" && size > 0 && size < most {
		most, limit = size, "the bucket's maximum value size"
	}
	for _, m := range messages {
		if most > 0 && int64(len(m.data)) > most {
			return 0, fmt.Errorf("%w: the object takes %d bytes, and the server allows %d; raise %s", tenure.ErrInvalid, len(m.data), most, limit)
		}
	}
	if s.cfg.Bucket != "" {
		for len(messages) > 1 {
			if _, err := s.publish(ctx, id+"."+strconv.Itoa(len(messages)), messages[0]); err != nil {
				return 0, err
			}
			messages = messages[1:]
		}
	}
	for stale := 0; ; {
		sequence, err := s.try(ctx, id, messages)
		var api *jetstream.APIError
		if !errors.As(err, &api) {
			return sequence, err
		}
		switch api.ErrorCode {
		case wrongSequence:
			var is uint64
			_, _ = fmt.Sscanf(api.Description, "wrong last sequence: %d", &is)
			if stale++; len(messages) > 1 || is > messages[0].expect || stale == staleAnswers {
				return 0, errOvertaken
			}
			if err := storekit.Pause(ctx, longestPause); err != nil {
				return 0, fmt.Errorf("%w: %w", err, api)
			}
		case subjectInFlight, incompleteBatch, tooManyBatches, writeInFlight:
			if api.ErrorCode == writeInFlight && s.cfg.Bucket != "" {
				id += "." // a server before 2.12 says so for minutes of a message that it has refused
			}
			if err := storekit.Pause(ctx, longestPause); err != nil {
				return 0, fmt.Errorf("%w: %w", err, api)
			}
		default:
			return 0, full(err, api)
		}
	}
}

// full says what to do if the server refuses a message because it has no room for it.
func full(err error, api *jetstream.APIError) error {
	switch {
	case api.ErrorCode == storeFailed && strings.HasPrefix(api.Description, "maximum "):
		return fmt.Errorf("%w: the stream is full: raise its max_bytes or max_msgs (%w)", tenure.ErrSetup, err)
	case api.ErrorCode == accountFull, api.ErrorCode == serverFull, api.ErrorCode == storageFull:
		return fmt.Errorf("%w: no storage is left to the stream: raise the server's max_file_store or the account's limit, or purge what is not needed (%w)",
			tenure.ErrSetup, err)
	}
	return err
}

// try sends the messages once, several as an atomic batch.
func (s *Store) try(ctx context.Context, id string, messages []message) (uint64, error) {
	var last *nats.Msg
	for i, m := range messages {
		last = nats.NewMsg(m.subject)
		last.Data = m.data
		last.Header.Set(jetstream.ExpectedLastSubjSeqHeader, strconv.FormatUint(m.expect, 10))
		if m.expectOf != m.subject {
			last.Header.Set(jetstream.ExpectedLastSubjSeqSubjHeader, m.expectOf)
		}
		if len(messages) == 1 {
			last.Header.Set(jetstream.MsgIDHeader, id)
			break
		}
		last.Header.Set(headerBatch, id)
		last.Header.Set(headerBatchNumber, strconv.Itoa(i+1))
		if i == len(messages)-1 {
			last.Header.Set(headerBatchCommit, "1")
		} else if err := s.nc.PublishMsg(last); err != nil {
			return 0, err
		}
	}
	answer, err := s.nc.RequestMsgWithContext(ctx, last)
	if errors.Is(err, nats.ErrNoResponders) {
		err = fmt.Errorf("stream %s is gone, or has no leader: %w", s.cfg.Stream, err)
	}
	if err != nil {
		return 0, err
	}
	var ack struct {
		Stream   string              `json:"stream"`
		Sequence uint64              `json:"seq"`
		Error    *jetstream.APIError `json:"error"`
	}
	switch err := json.Unmarshal(answer.Data, &ack); {
	case err != nil:
		return 0, fmt.Errorf("the acknowledgement can't be read: %w", err)
	case ack.Error != nil:
		return 0, ack.Error
	case ack.Stream != s.cfg.Stream || ack.Sequence == 0:
		return 0, fmt.Errorf("the acknowledgement is not stream %s's: %q", s.cfg.Stream, answer.Data)
	}
	return ack.Sequence, nil
}

// checkWrite refuses writes that this store must not do.
func (s *Store) checkWrite(key tenure.Key) error {
	if s.outdated {
		return fmt.Errorf("%w: this store's reads may be outdated, so it does not write", errors.ErrUnsupported)
	}
	return storekit.CheckFenced(s.term, key)
}

// PutIf writes the object if the condition holds. An object larger than the server's
// max_payload allows is [tenure.ErrInvalid].
func (s *Store) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (written tenure.Object, err error) {
	defer s.opError(ctx, &err, "put", obj.Key)
	if err := cmp.Or(obj.Validate(), cond.Validate(), s.checkWrite(obj.Key), ctx.Err()); err != nil {
		return tenure.Object{}, err
	}
	return s.write(ctx, obj.Key, func(before state) error { return cond.Check(obj.Key, before.version()) }, func(before state) (meta, []byte) {
		now := time.Now().UnixMicro()
		m := meta{Type: obj.Key.Type, ID: obj.Key.ID, Name: obj.Name, Labels: obj.Labels, Created: now, Updated: now}
		if before.version() != 0 {
			m.Created, m.Updated = before.Created, max(now, before.Updated)
		}
		return m, obj.Payload
	})
}

// DeleteIf deletes the object if it is at that version. A small message remains in the stream
// for each key that ever had an object.
func (s *Store) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) (err error) {
	defer s.opError(ctx, &err, "delete", key)
	if err := cmp.Or(key.Validate(), cond.ValidateDelete(), s.checkWrite(key), ctx.Err()); err != nil {
		return err
	}
	_, err = s.write(ctx, key, func(before state) error {
		if before.version() == 0 {
			return tenure.ErrNotFound
		}
		return cond.Check(key, before.version())
	}, func(before state) (meta, []byte) {
		return meta{Type: key.Type, ID: key.ID, Name: before.Name, Deleted: true}, nil
	})
	return err
}

// Overtake makes the servers refuse every acquire of the lease with this key, by any process, that was sent before
// and has not been stored yet. An acquire names the write that it follows, so Overtake writes once more that there
// is no object. If there is one, it returns [tenure.ErrExists]. A witness calls it for a process that is dead.
func (s *Store) Overtake(ctx context.Context, key tenure.Key) (err error) {
	defer s.opError(ctx, &err, "overtake", key)
	if err := cmp.Or(key.Validate(), s.checkWrite(key), ctx.Err()); err != nil {
		return err
	}
	_, err = s.write(ctx, key, func(before state) error {
		return tenure.IfAbsent().Check(key, before.version())
	}, func(before state) (meta, []byte) {
		return meta{Type: key.Type, ID: key.ID, Name: before.Name, Deleted: true}, nil
	})
	return err
}

// write replaces what the stream has for a key, if check allows it, with what make makes of it. If
// this process knows the state, it does not read first, because the server compares.
func (s *Store) write(ctx context.Context, key tenure.Key, check func(before state) error, make func(before state) (meta, []byte)) (tenure.Object, error) {
	ctx, cancel := s.limited(ctx)
	defer cancel()
	id := rand.Text() + "-"
	for tries := 0; ; tries++ {
		before, ok := s.recall(key)
		if !ok || check(before) != nil {
			var err error
			if before, _, err = s.read(ctx, key); err != nil {
				return tenure.Object{}, err
			}
			if err := check(before); err != nil {
				return tenure.Object{}, s.lostOr(ctx, err)
			}
		}
		m, payload := make(before)
		messages, err := s.messages(ctx, key, before, m, payload, tries >= patience)
		if err != nil && !errors.Is(err, errOvertaken) {
			return tenure.Object{}, s.lostOr(ctx, err)
		}
		var sequence uint64
		if err == nil {
			sequence, err = s.publish(ctx, id+strconv.Itoa(tries), messages...)
		}
		if err == nil {
			return s.wrote(key, sequence, m, payload), nil
		}
		s.forget(key)
		if !errors.Is(err, errOvertaken) {
			return tenure.Object{}, err
		}
		is, obj, err := s.read(ctx, key)
		if err != nil {
			return tenure.Object{}, err
		}
		if strings.HasPrefix(is.id, id) { // a server that no longer leads has refused it, and another has stored it
			return obj, nil
		}
		if err := s.lostOr(ctx, nil); err != nil {
			return tenure.Object{}, err
		}
		if err := storekit.Pause(ctx, min(time.Millisecond<<min(tries, 4), longestPause)); tries > 0 && err != nil {
			return tenure.Object{}, fmt.Errorf("%w: %w", err, errOvertaken)
		}
	}
}

// messages returns the messages of a write; the object's message is the last.
func (s *Store) messages(ctx context.Context, key tenure.Key, before state, m meta, payload []byte, impatient bool) (all []message, err error) {
	if s.term != nil {
		lease := s.term.Key()
		all = append(all, message{
			subject: s.prefix + ofFences + pair(lease.Type, lease.ID),
			data:    []byte(key.String()),
			expect:  uint64(s.term.Token()), expectOf: s.subject(lease) + s.begun,
		})
	}
	if m.Name != "" && m.Name != before.Name {
		claim, err := s.claim(ctx, key, before, m.Name, impatient)
		if err != nil {
			return nil, err
		}
		all = append(all, claim...)
	}
	subject := s.subject(key)
	is := message{subject: subject + s.begun, data: m.encode(payload), expect: before.sequence, expectOf: subject + s.either}
	if before.version() != 0 && !m.Deleted && before.payload == sha256.Sum256(payload) {
		is.subject = subject + s.renewed
	}
	return append(all, is), nil
}

// wrote remembers an object that was just written, and returns it.
func (s *Store) wrote(key tenure.Key, sequence uint64, m meta, payload []byte) tenure.Object {
	m.Labels = maps.Clone(m.Labels)
	s.saw(key, state{sequence: sequence, meta: m, payload: sha256.Sum256(payload)}, false)
	return tenure.Object{
		Key: key, Name: m.Name, Labels: maps.Clone(m.Labels), Payload: bytes.Clone(payload), Version: int64(sequence),
		CreatedAt: time.UnixMicro(m.Created).UTC(), UpdatedAt: time.UnixMicro(m.Updated).UTC(),
	}
}

// claim returns the messages by which an object gets a name. They fail if the name's owner changes
// meanwhile, or takes the name again. An existing object with the name has a claim to it, and so
// has an object that was deleted with the name. The latter yields: if it is created again, it has
// to claim the name again, instead of being written by one message.
//
// In a bucket, the claim is written before its object is, and says which version of that object
// the write will replace. Such a claim is void once the object is at another version without the
// name. Until then, other writers first wait for the write. If it does not come, they void the
// claim of a deleted object by writing its deletion again, and leave the name to an existing
// object.
func (s *Store) claim(ctx context.Context, key tenure.Key, before state, name string, impatient bool) ([]message, error) {
	subject := s.prefix + ofNames + pair(key.Type, name)
	msg, err := s.last(ctx, subject)
	if err != nil {
		return nil, err
	}
	var has claim
	if msg != nil {
		has.sequence = msg.Sequence
		_ = json.Unmarshal(msg.Data, &has) // another program's data owns nothing
	}
	var all []message
	if has.ID != "" && has.ID != key.ID {
		owner := tenure.Key{Type: key.Type, ID: has.ID}
		st, _, err := s.read(ctx, owner) // after the claim, so that it cannot have claimed the name since
		pending := s.cfg.Bucket != "" && st.sequence == has.At
		switch {
		case err != nil:
			return nil, err
		case st.Name == name && st.version() != 0:
			return nil, fmt.Errorf("%w: name %q is %s's", tenure.ErrTaken, name, owner)
		case pending && !impatient:
			return nil, errOvertaken
		case pending && st.version() != 0:
			return nil, fmt.Errorf("%w: name %q is claimed for %s, until that is written again", tenure.ErrTaken, name, owner)
		case st.Name == name, pending:
			if st.Name == name {
				st.Name = ""
			}
			all = append(all, message{
				subject: s.subject(owner) + s.begun,
				data:    meta{Type: owner.Type, ID: owner.ID, Name: st.Name, Deleted: true}.encode(nil),
				expect:  st.sequence, expectOf: s.subject(owner) + s.either,
			})
		}
	}
	is := claim{ID: key.ID}
	if s.cfg.Bucket != "" {
		is.At = before.sequence
	}
	data, err := json.Marshal(is)
	return append(all, message{subject: subject, data: data, expect: has.sequence, expectOf: subject}), err
}

// Fence returns the store with its writes fenced by a term: every term of the lease writes to one
// subject when it begins and when it ends, and the server stores a fenced write only if the last
// message of that subject is still the one whose sequence is the term's token. Fence does no I/O.
// In a bucket it returns [errors.ErrUnsupported], because a write there can depend on one entry
// only. Use the token instead.
func (s *Store) Fence(guard tenure.Guard) (tenure.Store, error) {
	if s.cfg.Bucket != "" {
		return nil, fmt.Errorf("natstenure: fence: %w: writes to a key-value bucket can't be fenced; use the term's token", errors.ErrUnsupported)
	}
	term, err := storekit.FenceTerm(s.term, guard)
	if err != nil {
		return nil, fmt.Errorf("natstenure: fence: %w", err)
	}
	if term == nil {
		return s, nil
	}
	return &Store{shared: s.shared, term: term, outdated: s.outdated}, nil
}

// lostOr returns the error of a refused write, unless the fence does not hold either, which takes
// precedence.
func (s *Store) lostOr(ctx context.Context, refusal error) error {
	if s.term == nil || !(refusal == nil || storekit.Refusal(refusal)) {
		return refusal
	}
	msg, err := s.last(ctx, s.subject(s.term.Key())+s.begun)
	switch {
	case err != nil:
		return err
	case msg != nil && msg.Sequence == uint64(s.term.Token()):
		return refusal
	}
	return storekit.LostTo(ctx, s, s.term)
}
