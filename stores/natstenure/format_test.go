package natstenure_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit/golden"
	"github.com/tenurelib/tenure/stores/natstenure"
)

func TestTheSubjectsAndMessagesOfAStreamStayAsTheyAre(t *testing.T) {
	js := connect(t, start(t).ClientURL())
	store := openOn(t, js, natstenure.Config{})
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{
		Key: tenure.Key{Type: "lease", ID: "nightly report"}, Holder: "replica-a", Labels: map[string]string{"address": "10.0.0.1:8080"},
	})
	require.NoError(t, err)
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, lease.Renew(t.Context(), term))
	fenced, err := store.Fence(term)
	require.NoError(t, err)
	_, err = fenced.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: "7"}, Name: "größe", Payload: []byte("a payload")}, tenure.IfAbsent())
	require.NoError(t, err)
	gone, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: strings.Repeat("long", 300)}, Name: "b"}, tenure.IfAbsent())
	require.NoError(t, err)
	require.NoError(t, store.DeleteIf(t.Context(), gone.Key, tenure.IfVersion(gone.Version)))

	compareMessages(t, js, "TENURE", "stream")
}

// compareMessages compares the last message of each subject of a stream with a golden file.
func compareMessages(t *testing.T, js jetstream.JetStream, name, file string) {
	t.Helper()
	stream, err := js.Stream(t.Context(), name)
	require.NoError(t, err)
	info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter(">"))
	require.NoError(t, err)
	var messages []*jetstream.RawStreamMsg
	for subject := range info.State.Subjects {
		message, err := stream.GetLastMsgForSubject(t.Context(), subject)
		require.NoError(t, err)
		messages = append(messages, message)
	}
	slices.SortFunc(messages, func(a, b *jetstream.RawStreamMsg) int { return int(a.Sequence) - int(b.Sequence) })
	var got strings.Builder
	for _, m := range messages {
		fmt.Fprintf(&got, "%s\n%s\n\n", m.Subject, strings.TrimSpace(string(m.Data)))
	}
	masked := regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f-]{27}`).ReplaceAllString(got.String(), "TERM")
	masked = regexp.MustCompile(`\b\d{13,}\b`).ReplaceAllString(masked, "NUMBER")
	golden.Compare(t, file, strings.ReplaceAll(masked, strings.Repeat("long", 300), "longlong…"))
}
