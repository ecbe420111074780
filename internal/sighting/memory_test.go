package sighting

import (
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/record"
)

func TestAnOrphanIsRememberedUntilItsRecordHasExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m Memory[string]
		m.AddOrphan("a", "acquire", false, time.Minute)
		require.True(t, m.HasOrphans())
		require.False(t, m.ReleasePending())
		m.AddOrphan("a", "release", true, time.Minute)
		require.True(t, m.ReleasePending())
		kept, ok := m.Orphan("a")
		require.True(t, ok)
		require.Equal(t, "release", kept)
		time.Sleep(time.Minute + 1)
		require.False(t, m.HasOrphans())
		require.False(t, m.ReleasePending())
	})
}

func TestARecordThatIsGoneEndsAFailedReleaseButNoFailedAcquire(t *testing.T) {
	var m Memory[int]
	m.AddOrphan("a", 1, false, time.Minute)
	m.AddOrphan("b", 2, true, time.Minute)
	m.Saw(nil, time.Now())
	require.False(t, m.ReleasePending())
	require.True(t, m.HasOrphans())
}

func TestTheOldestOfTooManyOrphansIsForgotten(t *testing.T) {
	var m Memory[int]
	for i := range 513 {
		m.AddOrphan(strconv.Itoa(i), i, false, time.Minute)
	}
	_, ok := m.Orphan("0")
	require.False(t, ok)
	_, ok = m.Orphan("1")
	require.True(t, ok)
}

func TestTheLastTermIsOwnUntilACopyTakesItAway(t *testing.T) {
	var m Memory[int]
	done := m.Begins("a")
	require.True(t, m.IsBeginning("a"))
	require.False(t, m.IsLast("a"))
	m.Began("a")
	done()
	require.False(t, m.IsBeginning("a"))
	require.True(t, m.IsLast("a"))
	m.FoundCopy("a")
	require.False(t, m.IsLast("a"))
}

func TestTheGreatestVersionIsRememberedUnlessTheStoreCannotCountOnFromIt(t *testing.T) {
	var m Memory[int]
	require.EqualValues(t, 0, m.SawVersion(7))
	require.EqualValues(t, 7, m.SawVersion(5))
	require.EqualValues(t, 7, m.SawVersion(objects.VersionLimit-1))
	require.EqualValues(t, 7, m.SawVersion(8))
	require.False(t, m.HasSeenNewer(1)) // no record was seen
	m.Saw(&record.Object{Version: 9}, time.Now())
	require.True(t, m.HasSeenNewer(8))
	require.False(t, m.HasSeenNewer(9))
}
