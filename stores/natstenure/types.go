package natstenure

import (
	"context"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tenurelib/tenure"
)

// Types returns at most limit types of the objects that the stream has or had, sorted by their
// bytes. It asks the server for the subjects of all objects. It is safe for concurrent use.
func (s *Store) Types(ctx context.Context, limit int) (types []string, err error) {
	defer s.opError(ctx, &err, "list", "types")
	ctx, cancel := s.limited(ctx)
	defer cancel()
	stream, err := s.ready(ctx)
	if err != nil {
		return nil, err
	}
	prefix := s.prefix + ofObjects
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(prefix+">"))
	if err != nil {
		return nil, err
	}
	subjects := make(map[string]string) // one of each type, by the type's token
	for subject := range info.State.Subjects {
		tok, _, _ := strings.Cut(strings.TrimPrefix(subject, prefix), ".")
		subjects[tok] = subject
	}
	for tok, subject := range subjects {
		text, ok := untoken(tok)
		if !ok { // the token has only a hash, and the message has the type
			msg, err := s.last(ctx, subject)
			if err != nil {
				return nil, err
			}
			if msg == nil {
				continue // it is gone by now
			}
			st, _ := decode(tenure.Key{}, msg.Sequence, msg.Data, msg.Time)
			text = st.Type
		}
		types = append(types, text)
	}
	slices.Sort(types)
	return types[:min(max(limit, 0), len(types))], nil
}
